// All kernels, as they are compiled together: by nvcc for a GPU, and by a C++ compiler over emulated threads.
#include "device.h"

#include "rows.cu"
#include "caches.cu"
#include "changes.cu"
#include "product.cu"
#include "entries.h"
#include "plain_attention.cu"
#include "tensor_attention.cu"
#include "tensor_mass.cu"
#include "mass.cu"
#include "peak.cu"
