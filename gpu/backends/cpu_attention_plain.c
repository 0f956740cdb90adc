#define LANES 4
#define ATTENTION attention_plain
#include "cpu_attention_kernel.h"
