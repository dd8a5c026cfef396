# The Python extension: thin lambdas over the engine, one file per area.
find_package(Python 3.10 COMPONENTS Interpreter Development.Module OPTIONAL_COMPONENTS Development.SABIModule)
if(NOT Python_Development.Module_FOUND)
  message(FATAL_ERROR "the headers of Python ${Python_VERSION} (${Python_EXECUTABLE}) were not found. On Debian and Ubuntu, for its own Python: "
                      "sudo apt-get install python3-dev")
endif()
if(NOT SKBUILD)
  execute_process(COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_ROOT)
endif()
find_package(nanobind CONFIG REQUIRED)
file(GLOB SHARDOW_PYTHON_SOURCES CONFIGURE_DEPENDS python/src/*.cc)
nanobind_add_module(_core STABLE_ABI NB_STATIC NOMINSIZE ${SHARDOW_PYTHON_SOURCES})
# Tests link the other files with a module of their own.
set_target_properties(_core PROPERTIES UNITY_BUILD_BATCH_SIZE 4)
set_source_files_properties(python/src/module.cc PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
target_include_directories(_core PRIVATE src)
target_link_libraries(_core PRIVATE shardow fmt::fmt)
# One symbol goes out: what is linked in statically neither replaces what other modules of the process have, nor is replaced by it.
target_link_options(_core PRIVATE -Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/exports.map)
set_target_properties(_core PROPERTIES LINK_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/exports.map)
if(SHARDOW_WERROR)
  target_compile_options(_core PRIVATE -Wall -Wextra -Werror)
endif()
nanobind_add_stub(_core_stub MODULE _core OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/_core.pyi PYTHON_PATH $<TARGET_FILE_DIR:_core> DEPENDS _core)
install(TARGETS _core LIBRARY DESTINATION shardow)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/_core.pyi DESTINATION shardow)
if(SHARDOW_LICENSES)  # of what is linked in, for who passes the module on
  install(DIRECTORY ${SHARDOW_LICENSES}/ DESTINATION ${SKBUILD_METADATA_DIR}/licenses)
endif()
