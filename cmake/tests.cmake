# One test program per layer, from the foo_test.cc files that stand beside its sources.
find_package(GTest REQUIRED)
include(GoogleTest)
# Tests, simulated ranks and devices are quicker to compile at -O1, and as quick to run; what they test is the engine as it is installed.
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

set(layers base tensor kernels average group file ema merge posthoc)
if(SHARDOW_COMMAND)
  list(APPEND layers cli)
endif()
foreach(layer IN LISTS layers)
  file(GLOB tests CONFIGURE_DEPENDS src/${layer}/*_test.cc)
  if(tests)
    add_executable(${layer}_test ${tests})
    set_target_properties(${layer}_test PROPERTIES UNITY_BUILD_BATCH_SIZE 16)  # gtest is all headers
    target_include_directories(${layer}_test PRIVATE src tests/cuda tests/groups tests/hooks)
    target_link_libraries(${layer}_test PRIVATE shardow test_options hwy::hwy fmt::fmt simdjson::simdjson GTest::gtest_main Threads::Threads)
    if(layer STREQUAL "group")
      target_sources(group_test PRIVATE $<TARGET_OBJECTS:group_checks>)
    elseif(layer STREQUAL "kernels")
      target_sources(kernels_test PRIVATE $<TARGET_OBJECTS:roofline>)
    endif()
    if(layer STREQUAL "cli")
      target_link_libraries(cli_test PRIVATE shardow_cli)
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

# CUDA's driver and its compiler without a device, under the names by which the engine opens NVIDIA's, from where Python's tests have them too.
# The kernels are a library of their own: what it has of a thread's own is their shared memory.
add_library(fake_kernels SHARED tests/cuda/twins.cc)
# Registers are copied whole, also where the last group loaded none that follow.
target_compile_options(fake_kernels PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
target_link_libraries(fake_kernels PRIVATE test_options)
add_library(fake_driver SHARED tests/cuda/control.cc tests/cuda/driver.cc tests/cuda/emulation.cc)
target_link_libraries(fake_driver PUBLIC fake_kernels)
add_library(fake_nvrtc SHARED tests/cuda/nvrtc.cc)
set_target_properties(fake_driver PROPERTIES OUTPUT_NAME cuda SOVERSION 1)
set_target_properties(fake_nvrtc PROPERTIES OUTPUT_NAME nvrtc SOVERSION 12)
foreach(library IN ITEMS fake_kernels fake_driver fake_nvrtc)
  set_target_properties(${library} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/fake)
  target_include_directories(${library} PUBLIC tests/cuda PRIVATE src include)
  target_compile_options(${library} PRIVATE -Wno-unknown-pragmas)
  target_link_libraries(${library} PRIVATE shardow_options)
endforeach()
if(SHARDOW_SANITIZE MATCHES "address")  # an access of a kernel's that is not aligned
  set_source_files_properties(tests/cuda/twins.cc PROPERTIES COMPILE_OPTIONS -fsanitize=alignment)
endif()

function(add_fake_device_test name)
  add_executable(${name}_test ${ARGN})
  target_include_directories(${name}_test PRIVATE tests/cuda tests/simulate src)
  target_link_libraries(${name}_test PRIVATE fake_driver shardow test_options fmt::fmt GTest::gtest_main Threads::Threads)
  add_dependencies(${name}_test fake_nvrtc)
  add_test(NAME ${name} COMMAND ${name}_test)
  # AddressSanitizer's dlopen() does not look into the RUNPATH of who calls it.
  set_tests_properties(${name} PROPERTIES ENVIRONMENT LD_LIBRARY_PATH=${CMAKE_CURRENT_BINARY_DIR}/fake)
endfunction()
add_fake_device_test(cuda_calls tests/cuda/calls_test.cc)
add_fake_device_test(cuda_driver tests/cuda/driver_test.cc)
target_compile_options(cuda_driver_test PRIVATE -Wno-unknown-pragmas)  # which kernels have for NVRTC
add_fake_device_test(cuda_files tests/cuda/files_test.cc)
add_fake_device_test(cuda_programs tests/cuda/programs_test.cc tests/simulate/simulation.cc)
set_tests_properties(cuda_programs PROPERTIES TIMEOUT 3600)  # SHARDOW_ALL: ten thousand programs
find_path(CUDA_HEADERS cuda.h PATHS /usr/local/cuda/include) # NVIDIA's declarations, which the engine's are compared with
if(CUDA_HEADERS)
  target_include_directories(kernels_test SYSTEM PRIVATE ${CUDA_HEADERS})
endif()
# What runs on a device runs there too.
add_test(NAME cuda_kernels COMMAND kernels_test --gtest_filter=Cuda.*)
set_tests_properties(cuda_kernels PROPERTIES ENVIRONMENT LD_LIBRARY_PATH=${CMAKE_CURRENT_BINARY_DIR}/fake)
add_dependencies(kernels_test fake_driver fake_nvrtc)

# Saves on simulated ranks, clocks and disks.
add_executable(simulate_test tests/simulate/simulate_test.cc tests/simulate/explore_test.cc tests/simulate/run.cc tests/simulate/simulation.cc tests/simulate/world.cc tests/simulate/world_disk.cc
               tests/simulate/late_store.cc tests/simulate/trained_state.cc tests/simulate/trainer.cc tests/simulate/training_run.cc)
target_include_directories(simulate_test PRIVATE src tests/simulate)
target_link_libraries(simulate_test PRIVATE shardow test_options fmt::fmt GTest::gtest_main Threads::Threads)
# `make test-slow` makes more runs, and runs the test of this test: that mistakes are found.
add_test(NAME simulate COMMAND simulate_test --gtest_filter=-Simulate.FindsMistakes*)
# Each simulated run takes megabytes anew: they stay the process's.
if(NOT SHARDOW_SANITIZE)  # fewer go into a minute there, by themselves
  set(runs "SHARDOW_RUNS=1200;")
endif()
set_tests_properties(simulate PROPERTIES ENVIRONMENT "${runs}MALLOC_MMAP_THRESHOLD_=4294967296;MALLOC_TRIM_THRESHOLD_=4294967296")

