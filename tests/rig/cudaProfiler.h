/* The three calls of the profiler that pycuda links to; the package with CUDA's headers has not this one. */
#ifndef CUDA_PROFILER_H
#define CUDA_PROFILER_H

#include <cuda.h>

typedef enum CUoutput_mode_enum { CU_OUT_KEY_VALUE_PAIR = 0, CU_OUT_CSV = 1 } CUoutput_mode;

#ifdef __cplusplus
extern "C" {
#endif
CUresult CUDAAPI cuProfilerInitialize(const char *config, const char *output, CUoutput_mode mode);
CUresult CUDAAPI cuProfilerStart(void);
CUresult CUDAAPI cuProfilerStop(void);
#ifdef __cplusplus
}
#endif

#endif
