# How our own code is compiled. -ffp-contract=off: every fused multiply-add is written out, or results would differ between compilers.
add_library(shardow_options INTERFACE)
target_compile_options(shardow_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -ffp-contract=off -fvisibility=hidden>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 takes `"." + text` for an overlapping copy (its bug 105651).
  target_compile_options(shardow_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
if(SHARDOW_WERROR)
  target_compile_options(shardow_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
if(SHARDOW_SANITIZE)
  target_compile_options(shardow_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${SHARDOW_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer>)
  target_link_options(shardow_options INTERFACE -fsanitize=${SHARDOW_SANITIZE})
endif()
