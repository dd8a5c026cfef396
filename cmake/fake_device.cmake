# The extension once more, over the fake device: fake/_core, for Python tests; never installed.
nanobind_add_module(_core_fake STABLE_ABI NB_STATIC NOMINSIZE NB_DOMAIN shardow_fake
  $<FILTER:$<TARGET_OBJECTS:_core>,EXCLUDE,module\\.cc> $<TARGET_OBJECTS:fake_device> tests/cuda/fake_module.cc)
set_target_properties(_core_fake PROPERTIES OUTPUT_NAME _core LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/fake)
target_include_directories(_core_fake BEFORE PRIVATE tests/cuda/include tests/cuda src python/src)
target_link_libraries(_core_fake PRIVATE shardow fmt::fmt)
