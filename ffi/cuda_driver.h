// The part of the CUDA driver API that a launch needs. Declared here so that building needs no CUDA toolkit and the
// library links no libcuda: the functions are looked up in libcuda.so.1 when first used, so loading works on machines
// without a driver.
#ifndef JAXQLA_FFI_CUDA_DRIVER_H_
#define JAXQLA_FFI_CUDA_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace jaxqla {

using CUresult = int;
using CUdevice = int;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUlibrary = struct CUlib_st*;
using CUkernel = struct CUkern_st*;
using CUfunction = struct CUfunc_st*;

inline constexpr int kCudaSuccess = 0;
// CUdevice_attribute
inline constexpr int kComputeCapabilityMajor = 75;
inline constexpr int kComputeCapabilityMinor = 76;
// CUfunction_attribute
inline constexpr int kMaxDynamicSharedBytes = 8;
inline constexpr int kNonPortableClusterSizeAllowed = 14;
// CUlaunchAttributeID
inline constexpr int kLaunchCooperative = 2;
inline constexpr int kLaunchClusterDimension = 4;
inline constexpr int kLaunchProgrammaticStreamSerialization = 6;

struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};
static_assert(sizeof(CUtensorMap) == 128);

union CUlaunchAttributeValue {
  char padding[64];
  int cooperative;
  int programmatic_stream_serialization_allowed;
  struct {
    unsigned x, y, z;
  } cluster_dim;
};

struct CUlaunchAttribute {
  int id;
  char padding[4];
  CUlaunchAttributeValue value;
};
static_assert(offsetof(CUlaunchAttribute, value) == 8 && sizeof(CUlaunchAttribute) == 72);

struct CUlaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned num_attributes;
};
static_assert(offsetof(CUlaunchConfig, stream) == 32 && sizeof(CUlaunchConfig) == 56);

struct CudaDriver {
  CUresult (*Init)(unsigned flags);
  CUresult (*GetErrorName)(CUresult, const char**);
  CUresult (*DeviceGet)(CUdevice*, int ordinal);
  CUresult (*DeviceGetAttribute)(int* value, int attribute, CUdevice);
  CUresult (*DevicePrimaryCtxRetain)(CUcontext*, CUdevice);
  CUresult (*CtxGetCurrent)(CUcontext*);
  CUresult (*CtxPushCurrent)(CUcontext);
  CUresult (*CtxPopCurrent)(CUcontext*);
  CUresult (*LibraryLoadData)(CUlibrary*, const void* image, void* jit_options, void** jit_values, unsigned num_jit,
                              void* options, void** values, unsigned num_options);
  CUresult (*LibraryGetKernel)(CUkernel*, CUlibrary, const char* symbol);
  CUresult (*KernelSetAttribute)(int attribute, int value, CUkernel, CUdevice);
  CUresult (*KernelGetFunction)(CUfunction*, CUkernel);
  CUresult (*FuncLoad)(CUfunction);  // null before CUDA 12.4
  CUresult (*TensorMapEncodeTiled)(CUtensorMap*, int data_type, uint32_t rank, void* address, const uint64_t* shape,
                                   const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                                   int interleave, int swizzle, int l2_promotion, int oob_fill);
  CUresult (*LaunchKernelEx)(const CUlaunchConfig*, CUfunction, void** params, void** extra);

  // Why the driver cannot be used; empty if it can.
  std::string error;
};

// Looks the functions up on the first call.
const CudaDriver& Driver();

// The driver's name of a result, such as CUDA_ERROR_INVALID_VALUE.
std::string ResultName(CUresult result);

}  // namespace jaxqla

#endif  // JAXQLA_FFI_CUDA_DRIVER_H_
