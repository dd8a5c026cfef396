# One test program per layer, from the foo_test.cc files that stand beside its sources.
find_package(GTest REQUIRED)
include(GoogleTest)
# Tests are quicker to compile at -O1, and what they test is the engine as it is installed. Simulated ranks and devices, which compute for long, are
# compiled as the engine is.
add_library(test_options INTERFACE)
target_link_libraries(test_options INTERFACE shardow_options)
target_compile_options(test_options INTERFACE $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O1>)

# What every Group must pass; tests/hooks gives it to Python.
add_library(group_checks OBJECT tests/groups/conformance.cc tests/groups/conformance_agree.cc)
target_include_directories(group_checks PUBLIC tests/groups PRIVATE src include)
target_link_libraries(group_checks PRIVATE test_options fmt::fmt)
# The machine's own limit, which benchmarks compare with.
add_library(roofline OBJECT tests/hooks/roofline.cc)
target_include_directories(roofline PUBLIC tests/hooks PRIVATE src include)
target_compile_options(roofline PRIVATE ${SHARDOW_ENGINE_OPTIONS})
target_link_libraries(roofline PRIVATE shardow_options hwy::hwy)

set(layers base tensor kernels average comm file ema merge posthoc)
if(SHARDOW_COMMAND)
  list(APPEND layers cli)
endif()
foreach(layer IN LISTS layers)
  file(GLOB tests CONFIGURE_DEPENDS src/${layer}/*_test.cc)
  if(tests)
    add_executable(${layer}_test ${tests})
    target_include_directories(${layer}_test PRIVATE src tests/groups tests/hooks)
    target_link_libraries(${layer}_test PRIVATE shardow test_options hwy::hwy fmt::fmt simdjson::simdjson GTest::gtest_main Threads::Threads)
    if(layer STREQUAL "comm")
      target_sources(comm_test PRIVATE $<TARGET_OBJECTS:group_checks>)
    elseif(layer STREQUAL "kernels")
      target_sources(kernels_test PRIVATE $<TARGET_OBJECTS:roofline>)
    endif()
    if(layer STREQUAL "cli")
      target_link_libraries(cli_test PRIVATE shardow_cli)
    endif()
    if(SHARDOW_HAVE_CUDA)
      target_link_libraries(${layer}_test PRIVATE CUDA::cudart_static)
      target_compile_definitions(${layer}_test PRIVATE SHARDOW_HAVE_CUDA)
    endif()
    add_test(NAME ${layer} COMMAND ${layer}_test)
  endif()
endforeach()

# What tests/faces compares with Python.
add_executable(trajectory tests/faces/trajectory.cc)
target_link_libraries(trajectory PRIVATE shardow shardow_options Threads::Threads)

# The command over files that nobody should have written, where the sanitizers look on.
if(SHARDOW_COMMAND AND SHARDOW_SANITIZE MATCHES "address")
  find_package(Python 3.10 COMPONENTS Interpreter REQUIRED)
  add_test(NAME cli_hostile COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tests/cli/hostile.py $<TARGET_FILE:shardow_command>)
endif()

# The CUDA path over a device that does not exist: the same sources, compiled without a toolkit over an emulation, with a runtime of the
# tests' own in place of NVIDIA's. Its objects come before the engine's library, whose own CUDA path (or its stub) is left out then.
file(GLOB fake_device CONFIGURE_DEPENDS tests/cuda/*.cc)
list(FILTER fake_device EXCLUDE REGEX "(_(test|module|main)|program(_[a-z]+)?)\\.cc$")
add_library(fake_device OBJECT ${fake_device} src/kernels/cuda_device.cc)
target_include_directories(fake_device BEFORE PUBLIC tests/cuda/include tests/cuda src include)
target_compile_options(fake_device PRIVATE -Wno-unknown-pragmas)
target_link_libraries(fake_device PRIVATE shardow_options)

function(add_fake_device_test name)
  add_executable(${name}_test ${ARGN} $<TARGET_OBJECTS:fake_device>)
  target_include_directories(${name}_test BEFORE PRIVATE tests/cuda/include tests/cuda src)
  target_link_libraries(${name}_test PRIVATE shardow test_options fmt::fmt GTest::gtest Threads::Threads)
  add_test(NAME ${name} COMMAND ${name}_test)
endfunction()
add_fake_device_test(cuda_calls tests/cuda/calls_test.cc tests/cuda/seeded_main.cc)
add_fake_device_test(cuda_fake tests/cuda/fake_test.cc tests/cuda/seeded_main.cc)
add_fake_device_test(cuda_files tests/cuda/files_test.cc tests/cuda/seeded_main.cc)
add_fake_device_test(cuda_kernels src/kernels/cuda_test.cc tests/cuda/seeded_main.cc)
target_compile_definitions(cuda_kernels_test PRIVATE SHARDOW_HAVE_CUDA)
add_fake_device_test(cuda_programs tests/cuda/programs_test.cc tests/cuda/program.cc tests/cuda/program_looks.cc tests/cuda/program_making.cc
                     tests/cuda/seeded_main.cc)
set_tests_properties(cuda_programs PROPERTIES TIMEOUT 3600)  # SHARDOW_ALL: ten thousand programs
add_fake_device_test(offload tests/cuda/offload_test.cc tests/cuda/offload_failures_test.cc tests/cuda/offload_places_test.cc
                     tests/cuda/offload_streams_test.cc tests/cuda/seeded_main.cc)

# Saves on simulated ranks, clocks and disks.
add_executable(simulate_test tests/simulate/simulate_test.cc tests/simulate/explore_test.cc tests/simulate/run.cc tests/simulate/simulation.cc tests/simulate/world.cc tests/simulate/world_disk.cc
               tests/simulate/late_store.cc tests/simulate/trained_state.cc tests/simulate/trainer.cc tests/simulate/training_run.cc)
target_include_directories(simulate_test PRIVATE src tests/simulate)
target_link_libraries(simulate_test PRIVATE shardow shardow_options fmt::fmt GTest::gtest_main Threads::Threads)
add_test(NAME simulate COMMAND simulate_test)

# In place of the whole CUDA path, one that allocates nothing.
add_executable(offload_allocations_test tests/cuda/allocations_test.cc)
target_include_directories(offload_allocations_test PRIVATE src)
target_link_libraries(offload_allocations_test PRIVATE shardow shardow_options GTest::gtest_main Threads::Threads)
add_test(NAME offload_allocations COMMAND offload_allocations_test)
