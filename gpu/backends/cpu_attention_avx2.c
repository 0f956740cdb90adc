#include "cpu_attention.h"
#if HAVE_WIDE_ATTENTION
#pragma GCC target("avx2,fma,f16c,bmi2")
#define ATTENTION attention_avx2
#include "cpu_attention_kernel.h"
#endif
