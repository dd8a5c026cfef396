# Without a compiler nothing can be looked for, so that all that a build from source needs is named with it.
include(CheckLanguage)
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  message(FATAL_ERROR "no C++ compiler was found. On Debian and Ubuntu: sudo apt-get install "
                      "g++ python3-dev libeigen3-dev libhwy-dev libsimdjson-dev libfmt-dev libisal-dev zlib1g-dev")
endif()
enable_language(CXX)
