# Code for machines older than this one: the glibc of build/wheel/ARCH/sysroot, and libstdc++ inside. WHEEL_ARCH: x86_64 or aarch64.
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES WHEEL_ARCH)
get_filename_component(WHEEL_ROOT ${CMAKE_CURRENT_LIST_DIR}/../../build/wheel/${WHEEL_ARCH} ABSOLUTE)
set(WHEEL_TRIPLE ${WHEEL_ARCH}-linux-gnu)

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR ${WHEEL_ARCH})
set(CMAKE_SYSROOT ${WHEEL_ROOT}/sysroot)
set(CMAKE_C_COMPILER ${WHEEL_TRIPLE}-gcc)
set(CMAKE_CXX_COMPILER ${WHEEL_TRIPLE}-g++)

# GCC looks for libc and its headers beside itself before it looks in the sysroot: a cross compiler has its own there. So all folders are named.
execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=include OUTPUT_VARIABLE WHEEL_GCC OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
get_filename_component(WHEEL_GCC_VERSION ${WHEEL_GCC}/.. ABSOLUTE)
get_filename_component(WHEEL_GCC_VERSION ${WHEEL_GCC_VERSION} NAME)
if(EXISTS /usr/${WHEEL_TRIPLE}/include/c++)
  set(WHEEL_CXX /usr/${WHEEL_TRIPLE}/include/c++/${WHEEL_GCC_VERSION})
  set(WHEEL_CXX_OF_ARCH ${WHEEL_CXX}/${WHEEL_TRIPLE})
else()
  set(WHEEL_CXX /usr/include/c++/${WHEEL_GCC_VERSION})
  set(WHEEL_CXX_OF_ARCH /usr/include/${WHEEL_TRIPLE}/c++/${WHEEL_GCC_VERSION})
endif()
set(WHEEL_C_FLAGS "-ffunction-sections -fdata-sections -nostdinc -isystem${WHEEL_GCC} -isystem${CMAKE_SYSROOT}/usr/include/${WHEEL_TRIPLE} -isystem${CMAKE_SYSROOT}/usr/include")
set(WHEEL_CXX_FLAGS "-nostdinc++ -isystem${WHEEL_CXX} -isystem${WHEEL_CXX_OF_ARCH} ${WHEEL_C_FLAGS}")
set(CMAKE_C_FLAGS_INIT "${WHEEL_C_FLAGS} -B${CMAKE_SYSROOT}/usr/lib/${WHEEL_TRIPLE}/ -fvisibility=hidden")
set(CMAKE_CXX_FLAGS_INIT "${WHEEL_CXX_FLAGS} -B${CMAKE_SYSROOT}/usr/lib/${WHEEL_TRIPLE}/ -fvisibility=hidden")
# This machine's libgcc_s wants a newer glibc than the sysroot has; the one that it will run with doesn't.
set(CMAKE_EXE_LINKER_FLAGS_INIT "-Wl,--gc-sections -static-libstdc++ -pthread -Wl,--allow-shlib-undefined")
set(CMAKE_MODULE_LINKER_FLAGS_INIT "-Wl,--gc-sections -static-libstdc++ -pthread -Wl,--as-needed -Wl,--exclude-libs,ALL ${WHEEL_ROOT}/libraries/lib/old_glibc.o")
if(EXISTS ${WHEEL_ROOT}/libraries/lib/old_glibc.o) # not before the libraries themselves are made
  string(APPEND CMAKE_EXE_LINKER_FLAGS_INIT " -Wl,--as-needed ${WHEEL_ROOT}/libraries/lib/old_glibc.o -ldl -lm")
endif()

set(CMAKE_FIND_ROOT_PATH ${WHEEL_ROOT}/libraries ${CMAKE_SYSROOT})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE BOTH)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE BOTH)
