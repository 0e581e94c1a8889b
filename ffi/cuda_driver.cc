#include "cuda_driver.h"

#include <dlfcn.h>

namespace jaxqla {
namespace {

template <typename Function>
bool Find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

CudaDriver Load() {
  CudaDriver driver{};
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    driver.error = reason != nullptr ? reason : "libcuda.so.1 not found";
    return driver;
  }
  const char* missing = nullptr;
  auto need = [&](const char* name, auto& function) {
    if (!Find(library, name, function)) missing = name;
  };
  need("cuInit", driver.Init);
  need("cuGetErrorName", driver.GetErrorName);
  need("cuDeviceGet", driver.DeviceGet);
  need("cuDeviceGetAttribute", driver.DeviceGetAttribute);
  need("cuDevicePrimaryCtxRetain", driver.DevicePrimaryCtxRetain);
  need("cuCtxGetCurrent", driver.CtxGetCurrent);
  need("cuCtxPushCurrent_v2", driver.CtxPushCurrent);
  need("cuCtxPopCurrent_v2", driver.CtxPopCurrent);
  need("cuLibraryLoadData", driver.LibraryLoadData);
  need("cuLibraryGetKernel", driver.LibraryGetKernel);
  need("cuKernelSetAttribute", driver.KernelSetAttribute);
  need("cuKernelGetFunction", driver.KernelGetFunction);
  need("cuTensorMapEncodeTiled", driver.TensorMapEncodeTiled);
  need("cuLaunchKernelEx", driver.LaunchKernelEx);
  Find(library, "cuFuncLoad", driver.FuncLoad);
  if (missing != nullptr) {
    driver.error = std::string("libcuda.so.1 lacks ") + missing;
  } else if (CUresult result = driver.Init(0); result != kCudaSuccess) {
    const char* name = nullptr;
    driver.GetErrorName(result, &name);
    driver.error = std::string("cuInit gave ") + (name != nullptr ? name : std::to_string(result).c_str());
  }
  return driver;
}

}  // namespace

const CudaDriver& Driver() {
  static const CudaDriver driver = Load();
  return driver;
}

std::string ResultName(CUresult result) {
  const char* name = nullptr;
  if (Driver().GetErrorName == nullptr || Driver().GetErrorName(result, &name) != kCudaSuccess || name == nullptr) {
    return "CUDA error " + std::to_string(result);
  }
  return name;
}

}  // namespace jaxqla
