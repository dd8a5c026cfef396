// The CUDA path as it is, compiled by g++ over the emulation.
#include "kernels/cuda.cu"
