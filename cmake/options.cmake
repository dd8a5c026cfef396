# How our own code is compiled. -ffp-contract=off: every fused multiply-add is written out, or results would differ between compilers.
add_library(shardow_options INTERFACE)
target_compile_options(shardow_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -ffp-contract=off -fvisibility=hidden>)
if(SHARDOW_SANITIZE)
  target_compile_options(shardow_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${SHARDOW_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer>)
  target_link_options(shardow_options INTERFACE -fsanitize=${SHARDOW_SANITIZE})
endif()
