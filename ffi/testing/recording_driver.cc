// Stands in for libcuda.so.1 in tests: has no device, prints what is asked of it.
//
// Environment: RECORD_INIT, result of cuInit; RECORD_CAPABILITIES, compute capability of each device, as in "90 80";
// RECORD_FAIL, a function that gives CUDA_ERROR_INVALID_VALUE; RECORD_SLOW, milliseconds that loading an image takes,
// so that threads meet there; RECORD_PARAMS, the kernel's parameters as one letter each: m tensor map, p pointer, i
// int32, l int64, f float32, d float64.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "../cuda_driver.h"

namespace {

using namespace jaxqla;

constexpr CUresult kInvalidValue = 1;
constexpr uintptr_t kContexts = 0x100, kFunctions = 0x5000;

thread_local std::vector<CUcontext> contexts;
std::atomic<uint64_t> num_maps{0};

std::string Setting(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

int Capability(CUdevice device) {
  std::istringstream fields(Setting("RECORD_CAPABILITIES"));
  int capability = 90;
  for (int i = 0; i <= device && fields >> capability; ++i) {
  }
  return capability;
}

// The device whose primary context is current, or -1.
int Current() {
  return contexts.empty() ? -1 : static_cast<int>(reinterpret_cast<uintptr_t>(contexts.back()) - kContexts);
}

CUresult Record(const char* name, const std::string& text) {
  std::printf("%s %s\n", name, text.c_str());
  return Setting("RECORD_FAIL") == name ? kInvalidValue : kCudaSuccess;
}

template <typename Number>
std::string List(const Number* numbers, size_t size) {
  std::ostringstream out;
  for (size_t i = 0; i < size; ++i) out << (i > 0 ? "," : "") << numbers[i];
  return size > 0 ? out.str() : "-";
}

template <typename T>
T Read(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned) {
  const std::string result = Setting("RECORD_INIT");
  return result.empty() ? kCudaSuccess : std::stoi(result);
}

CUresult cuGetErrorName(CUresult result, const char** name) {
  *name = result == kInvalidValue ? "CUDA_ERROR_INVALID_VALUE" : result == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_OTHER";
  return kCudaSuccess;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return kCudaSuccess;
}

CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  *value = attribute == kComputeCapabilityMajor ? Capability(device) / 10 : Capability(device) % 10;
  return kCudaSuccess;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(kContexts + device);
  return Record("cuDevicePrimaryCtxRetain", "device " + std::to_string(device));
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = contexts.empty() ? nullptr : contexts.back();
  return kCudaSuccess;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  contexts.push_back(context);
  return Record("cuCtxPushCurrent", "device " + std::to_string(Current()));
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  *context = contexts.back();
  contexts.pop_back();
  return Record("cuCtxPopCurrent", "then " + std::to_string(Current()));
}

CUresult cuLibraryLoadData(CUlibrary* library, const void* image, void*, void**, unsigned, void*, void**, unsigned) {
  *library = reinterpret_cast<CUlibrary>(0x2000);
  if (const std::string slow = Setting("RECORD_SLOW"); !slow.empty()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(std::stoi(slow)));
  }
  return Record("cuLibraryLoadData", static_cast<const char*>(image));
}

CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary, const char* symbol) {
  *kernel = reinterpret_cast<CUkernel>(0x3000);
  return Record("cuLibraryGetKernel", symbol);
}

CUresult cuKernelSetAttribute(int attribute, int value, CUkernel, CUdevice device) {
  return Record("cuKernelSetAttribute",
                std::to_string(attribute) + "=" + std::to_string(value) + " device " + std::to_string(device));
}

CUresult cuKernelGetFunction(CUfunction* function, CUkernel) {
  *function = reinterpret_cast<CUfunction>(kFunctions + Current());
  return Record("cuKernelGetFunction", "device " + std::to_string(Current()));
}

CUresult cuFuncLoad(CUfunction) { return Record("cuFuncLoad", "device " + std::to_string(Current())); }

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, int data_type, uint32_t rank, void* address, const uint64_t* shape,
                                const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                                int interleave, int swizzle, int l2_promotion, int oob_fill) {
  map->opaque[0] = ++num_maps;
  std::ostringstream out;
  out << "type " << data_type << " address " << address << " shape " << List(shape, rank) << " strides "
      << List(strides, rank - 1) << " box " << List(box, rank) << " steps " << List(element_strides, rank) << " enums "
      << interleave << "," << swizzle << "," << l2_promotion << "," << oob_fill;
  return Record("cuTensorMapEncodeTiled", out.str());
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params, void**) {
  std::ostringstream out;
  out << "device " << reinterpret_cast<uintptr_t>(function) - kFunctions << "," << Current() << " stream "
      << static_cast<void*>(config->stream) << " grid " << List(config->grid, 3) << " block " << List(config->block, 3)
      << " shared " << config->shared_bytes << " attributes";
  for (unsigned i = 0; i < config->num_attributes; ++i) {
    const CUlaunchAttribute& attribute = config->attributes[i];
    out << " " << attribute.id << "=";
    if (attribute.id == kLaunchClusterDimension) {
      out << attribute.value.cluster_dim.x << "x" << attribute.value.cluster_dim.y << "x"
          << attribute.value.cluster_dim.z;
    } else {
      out << attribute.value.cooperative;
    }
  }
  out << " params";
  const std::string kinds = Setting("RECORD_PARAMS");
  for (size_t i = 0; i < kinds.size(); ++i) {
    out << " ";
    switch (kinds[i]) {
      case 'm':
        out << "map" << Read<CUtensorMap>(params[i]).opaque[0];
        break;
      case 'p':
        out << Read<void*>(params[i]);
        break;
      case 'i':
        out << Read<int32_t>(params[i]);
        break;
      case 'l':
        out << Read<int64_t>(params[i]);
        break;
      case 'f':
        out << Read<float>(params[i]);
        break;
      case 'd':
        out << Read<double>(params[i]);
        break;
    }
  }
  return Record("cuLaunchKernelEx", out.str());
}

}  // extern "C"
