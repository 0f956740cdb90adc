#include "cpu_attention.h"
#if HAVE_WIDE_ATTENTION
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")
#define LANES 16
#define ATTENTION attention_avx512
#include "cpu_attention_kernel.h"
#endif
