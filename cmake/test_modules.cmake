# The extension again, for Python tests, never installed: hooks/_core has the submodule `hooks` besides.
function(add_test_module name folder)
  nanobind_add_module(${name} STABLE_ABI NB_STATIC NOMINSIZE NB_DOMAIN shardow_${folder}
    $<FILTER:$<TARGET_OBJECTS:_core>,EXCLUDE,module\\.cc> tests/hooks/hooks.cc $<TARGET_OBJECTS:group_checks> $<TARGET_OBJECTS:roofline> ${ARGN})
  set_target_properties(${name} PROPERTIES OUTPUT_NAME _core LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/${folder})
  target_include_directories(${name} PRIVATE tests/hooks tests/groups src python/src)
  target_link_libraries(${name} PRIVATE shardow fmt::fmt)
endfunction()
add_test_module(_core_hooks hooks tests/hooks/module.cc)
