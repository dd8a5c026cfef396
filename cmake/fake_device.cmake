# The extension once more, with a runtime without a device in place of NVIDIA's: fake/_core, for Python tests; never installed.
if(SHARDOW_HAVE_CUDA)
  nanobind_add_module(_core_fake STABLE_ABI NB_STATIC NOMINSIZE NB_DOMAIN shardow_fake
    $<FILTER:$<TARGET_OBJECTS:_core>,EXCLUDE,module\\.cc> tests/cuda/fake_module.cc tests/cuda/fake_runtime.cc)
  set_target_properties(_core_fake PROPERTIES OUTPUT_NAME _core LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/fake)
  target_include_directories(_core_fake PRIVATE src python/src tests/cuda ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(_core_fake PRIVATE shardow fmt::fmt)
endif()
