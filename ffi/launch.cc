// The XLA FFI handler: launches any kernel of the table.
//
// `initialize` loads the cubin and opts in to its shared memory, outside any capture. `execute` binds the dimensions to
// the shapes of the call, checks every buffer, encodes the tensor maps and launches: no allocation on the device, no
// synchronisation, nothing that depends on data, so it may run under graph capture.
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cuda_driver.h"
#include "launch_table.h"
#include "xla/ffi/api/ffi.h"

namespace jaxqla {
namespace {

namespace ffi = xla::ffi;

constexpr int kMaxDevices = 64;
constexpr int kMaxGridYZ = 65535;

ffi::Error Fail(ffi::ErrorCode code, std::string_view kernel, const std::string& text) {
  return ffi::Error(code, "jaxqla: " + std::string(kernel) + ": " + text);
}

ffi::Error Invalid(std::string_view kernel, const std::string& text) {
  return Fail(ffi::ErrorCode::kInvalidArgument, kernel, text);
}

// ---- the folder of this library: table and cubins lie beside it

std::string Folder() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&Folder), &info) == 0 || info.dli_fname == nullptr) return ".";
  const std::string path = info.dli_fname;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw TableError("jaxqla: " + path + " must be readable");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// ---- a kernel that may be loaded

struct Kernel {
  KernelRecord record;
  std::mutex mutex;
  std::string image;  // the driver may read it for as long as the library lives
  CUkernel handle = nullptr;
  std::array<std::atomic<CUfunction>, kMaxDevices> functions{};
};

using Kernels = std::map<std::string, std::unique_ptr<Kernel>, std::less<>>;

// Reads the table on the first call; throws TableError, and tries again on the next one.
const Kernels& AllKernels() {
  static const Kernels kernels = [] {
    Kernels found;
    for (auto& [name, record] : ReadTable(ReadFile(Folder() + "/launch_table.txt"))) {
      auto kernel = std::make_unique<Kernel>();
      kernel->record = std::move(record);
      found.emplace(name, std::move(kernel));
    }
    return found;
  }();
  return kernels;
}

// ---- the device of a call, whatever the thread had before

class DeviceScope {
 public:
  DeviceScope() = default;
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  ~DeviceScope() {
    CUcontext context;
    if (pushed_) Driver().CtxPopCurrent(&context);
  }

  // XLA works in the primary context as well.
  CUresult Enter(int32_t ordinal) {
    static std::array<std::atomic<CUcontext>, kMaxDevices> primary{};
    const CudaDriver& driver = Driver();
    CUcontext context = primary[ordinal].load();
    if (context == nullptr) {
      CUdevice device;
      if (CUresult result = driver.DeviceGet(&device, ordinal); result != kCudaSuccess) return result;
      if (CUresult result = driver.DevicePrimaryCtxRetain(&context, device); result != kCudaSuccess) return result;
      primary[ordinal] = context;
    }
    CUcontext current = nullptr;
    if (CUresult result = driver.CtxGetCurrent(&current); result != kCudaSuccess) return result;
    if (current == context) return kCudaSuccess;
    const CUresult result = driver.CtxPushCurrent(context);
    pushed_ = result == kCudaSuccess;
    return result;
  }

 private:
  bool pushed_ = false;
};

#define JAXQLA_CUDA(name, call)                                                                                \
  do {                                                                                                         \
    if (CUresult result = Driver().call; result != kCudaSuccess) {                                             \
      return Fail(ffi::ErrorCode::kInternal, name,                                                             \
                  std::string(#call).substr(0, std::string(#call).find('(')) + " gave " + ResultName(result)); \
    }                                                                                                          \
  } while (0)

// Loads the cubin once for the process, and the function once a device.
ffi::Error Load(Kernel& kernel, int32_t ordinal, CUfunction* function) {
  *function = kernel.functions[ordinal].load();
  if (*function != nullptr) return ffi::Error::Success();
  const KernelRecord& record = kernel.record;
  const CudaDriver& driver = Driver();
  std::lock_guard<std::mutex> lock(kernel.mutex);
  *function = kernel.functions[ordinal].load();  // another thread may have been first
  if (*function != nullptr) return ffi::Error::Success();
  CUdevice device;
  JAXQLA_CUDA(record.name, DeviceGet(&device, ordinal));
  int major = 0, minor = 0;
  JAXQLA_CUDA(record.name, DeviceGetAttribute(&major, kComputeCapabilityMajor, device));
  JAXQLA_CUDA(record.name, DeviceGetAttribute(&minor, kComputeCapabilityMinor, device));
  if (major != 9 || minor != 0) {
    return Fail(ffi::ErrorCode::kFailedPrecondition, record.name,
                "compute capability must be 9.0, got " + std::to_string(major) + "." + std::to_string(minor));
  }
  if (kernel.handle == nullptr) {
    kernel.image = ReadFile(Folder() + "/" + record.cubin);
    CUlibrary library;
    JAXQLA_CUDA(record.name, LibraryLoadData(&library, kernel.image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0));
    JAXQLA_CUDA(record.name, LibraryGetKernel(&kernel.handle, library, record.symbol.c_str()));
  }
  JAXQLA_CUDA(record.name,
              KernelSetAttribute(kMaxDynamicSharedBytes, static_cast<int>(record.shared_bytes), kernel.handle, device));
  JAXQLA_CUDA(record.name, KernelGetFunction(function, kernel.handle));
  // Code is loaded at the first launch otherwise, which may be under capture.
  if (driver.FuncLoad != nullptr) JAXQLA_CUDA(record.name, FuncLoad(*function));
  kernel.functions[ordinal] = *function;
  return ffi::Error::Success();
}

// ---- the buffers of a call

std::optional<DataType> TypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::S8:
      return DataType::kInt8;
    case ffi::U8:
      return DataType::kUint8;
    case ffi::S32:
      return DataType::kInt32;
    case ffi::U32:
      return DataType::kUint32;
    case ffi::S64:
      return DataType::kInt64;
    case ffi::U64:
      return DataType::kUint64;
    case ffi::F16:
      return DataType::kFloat16;
    case ffi::BF16:
      return DataType::kBfloat16;
    case ffi::F32:
      return DataType::kFloat32;
    case ffi::F64:
      return DataType::kFloat64;
    default:
      return std::nullopt;
  }
}

struct Bound {
  ffi::Span<const int64_t> shape;
  void* data = nullptr;
};

std::string Text(ffi::Span<const int64_t> shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + ")";
}

ffi::Error CheckBuffer(const KernelRecord& record, const BufferRecord& buffer, ffi::AnyBuffer found) {
  const std::optional<DataType> type = TypeOf(found.element_type());
  if (type != buffer.type) {
    const std::string got(type ? Name(*type) : "a dtype no kernel takes");
    return Invalid(record.name, buffer.name + " must have dtype " + std::string(Name(buffer.type)) + ", got " + got);
  }
  if (found.dimensions().size() != buffer.shape.size()) {
    return Invalid(record.name, buffer.name + " must have " + std::to_string(buffer.shape.size()) +
                                    " dimensions, got shape " + Text(found.dimensions()));
  }
  return ffi::Error::Success();
}

ffi::Error CheckShape(const KernelRecord& record, const BufferRecord& buffer, const Bound& bound, const int64_t* dims) {
  for (size_t axis = 0; axis < buffer.shape.size(); ++axis) {
    int64_t expected = 0;
    if (!buffer.shape[axis].Evaluate(dims, &expected) || expected != bound.shape[axis]) {
      return Invalid(record.name, buffer.name + " must have " + buffer.shape[axis].text() + " = " +
                                      std::to_string(expected) + " on axis " + std::to_string(axis) + ", got shape " +
                                      Text(bound.shape));
    }
  }
  return ffi::Error::Success();
}

// ---- the two stages

ffi::ErrorOr<Kernel*> Find(ffi::Dictionary attributes) {
  const ffi::ErrorOr<std::string_view> name = attributes.get<std::string_view>("kernel");
  if (name.has_error()) return ffi::Unexpected(Invalid("launch", "attribute kernel must be a string"));
  if (!Driver().error.empty()) {
    return ffi::Unexpected(
        Fail(ffi::ErrorCode::kFailedPrecondition, *name, "needs an NVIDIA driver: " + Driver().error));
  }
  try {
    const Kernels& kernels = AllKernels();
    const auto found = kernels.find(*name);
    if (found == kernels.end())
      return ffi::Unexpected(Fail(ffi::ErrorCode::kNotFound, *name, "must be in the launch table"));
    return found->second.get();
  } catch (const std::exception& error) {
    return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kFailedPrecondition, error.what()));
  }
}

ffi::Error CheckOrdinal(const KernelRecord& record, int32_t ordinal) {
  if (ordinal >= 0 && ordinal < kMaxDevices) return ffi::Error::Success();
  return Invalid(record.name, "device ordinal must be in [0, 64), got " + std::to_string(ordinal));
}

ffi::Error Initialize(int32_t ordinal, ffi::Dictionary attributes) {
  const ffi::ErrorOr<Kernel*> kernel = Find(attributes);
  if (kernel.has_error()) return kernel.error();
  if (ffi::Error error = CheckOrdinal((*kernel)->record, ordinal); error.failure()) return error;
  DeviceScope scope;
  if (CUresult result = scope.Enter(ordinal); result != kCudaSuccess) {
    return Fail(ffi::ErrorCode::kInternal, (*kernel)->record.name, "device context: " + ResultName(result));
  }
  try {
    CUfunction function;
    return Load(**kernel, ordinal, &function);
  } catch (const std::exception& error) {
    return Fail(ffi::ErrorCode::kFailedPrecondition, (*kernel)->record.name, error.what());
  }
}

ffi::Error EncodeMap(const KernelRecord& record, const MapRecord& map, const Bound& bound, const int64_t* dims,
                     CUtensorMap* out) {
  std::memset(out, 0, sizeof(*out));
  uint64_t shape[kMaxMapRank], strides[kMaxMapRank];
  const size_t rank = map.shape.size();
  for (size_t i = 0; i < rank; ++i) {
    int64_t value = 0;
    if (!map.shape[i].Evaluate(dims, &value)) return Invalid(record.name, map.name + " must have sizes within int64");
    if (value <= 0) return ffi::Error::Success();  // an empty buffer: no block reads through this map
    shape[i] = static_cast<uint64_t>(value);
  }
  for (size_t i = 0; i + 1 < rank; ++i) {
    int64_t value = 0;
    if (!map.strides[i].Evaluate(dims, &value))
      return Invalid(record.name, map.name + " must have strides within int64");
    strides[i] = static_cast<uint64_t>(value);
  }
  JAXQLA_CUDA(record.name, TensorMapEncodeTiled(out, map.data_type, static_cast<uint32_t>(rank), bound.data, shape,
                                                strides, map.box.data(), map.element_strides.data(), map.interleave,
                                                map.swizzle, map.l2_promotion, map.oob_fill));
  return ffi::Error::Success();
}

union ScalarValue {
  float f32;
  double f64;
  int32_t i32;
  int64_t i64;
};

template <typename T>
ffi::Error ReadScalar(const KernelRecord& record, const ScalarRecord& scalar, ffi::Dictionary attributes, T* value) {
  const ffi::ErrorOr<T> found = attributes.get<T>(scalar.name);
  if (found.has_error())
    return Invalid(record.name, "attribute " + scalar.name + " must be " + std::string(Name(scalar.type)));
  *value = *found;
  return ffi::Error::Success();
}

ffi::Error ReadScalar(const KernelRecord& record, const ScalarRecord& scalar, ffi::Dictionary attributes,
                      ScalarValue* value) {
  switch (scalar.type) {
    case DataType::kFloat32:
      return ReadScalar(record, scalar, attributes, &value->f32);
    case DataType::kFloat64:
      return ReadScalar(record, scalar, attributes, &value->f64);
    case DataType::kInt32:
      return ReadScalar(record, scalar, attributes, &value->i32);
    case DataType::kInt64:
      return ReadScalar(record, scalar, attributes, &value->i64);
    default:
      return Invalid(record.name, "scalar " + scalar.name + " must be float32, float64, int32 or int64");
  }
}

ffi::Error Launch(Kernel& kernel, CUstream stream, int32_t ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  ffi::Dictionary attributes) {
  const KernelRecord& record = kernel.record;
  if (args.size() != static_cast<size_t>(record.num_operands) ||
      rets.size() != static_cast<size_t>(record.num_results)) {
    return Invalid(record.name, "call must have " + std::to_string(record.num_operands) + " operands and " +
                                    std::to_string(record.num_results) + " results, got " +
                                    std::to_string(args.size()) + " and " + std::to_string(rets.size()));
  }
  Bound bounds[kMaxBuffers];
  for (size_t i = 0; i < record.buffers.size(); ++i) {
    const BufferRecord& buffer = record.buffers[i];
    std::optional<ffi::AnyBuffer> operand, result;
    if (buffer.operand >= 0) {
      const auto found = args.get<ffi::AnyBuffer>(buffer.operand);
      if (found.has_error()) return found.error();
      operand = *found;
    }
    if (buffer.result >= 0) {
      auto found = rets.get<ffi::AnyBuffer>(buffer.result);
      if (found.has_error()) return found.error();
      result = **found;
    }
    const ffi::AnyBuffer used = result ? *result : *operand;
    if (operand && result && operand->untyped_data() != result->untyped_data() && used.element_count() > 0) {
      return Invalid(record.name, buffer.name + " must be one buffer as operand and result, got two");
    }
    if (ffi::Error error = CheckBuffer(record, buffer, used); error.failure()) return error;
    bounds[i] = {used.dimensions(), used.untyped_data()};
  }
  int64_t dims[kMaxDims];
  for (size_t i = 0; i < record.dims.size(); ++i) {
    const DimRecord& dim = record.dims[i];
    dims[i] = bounds[dim.buffer].shape[dim.axis] + dim.offset;
    if (dims[i] < 0 || dims[i] > INT32_MAX) {
      return Invalid(record.name, dim.name + " must be in [0, 2^31), got " + std::to_string(dims[i]));
    }
  }
  for (size_t i = 0; i < record.buffers.size(); ++i) {
    if (ffi::Error error = CheckShape(record, record.buffers[i], bounds[i], dims); error.failure()) return error;
  }

  CUlaunchConfig config{};
  for (int i = 0; i < 3; ++i) {
    int64_t size = 0;
    const int64_t most = i == 0 ? INT32_MAX : kMaxGridYZ;
    if (!record.grid[i].Evaluate(dims, &size) || size < 0 || size > most) {
      return Invalid(record.name, "grid axis " + std::to_string(i) + " = " + record.grid[i].text() +
                                      " must be in [0, " + std::to_string(most) + "], got " + std::to_string(size));
    }
    if (size == 0) return ffi::Error::Success();
    config.grid[i] = static_cast<unsigned>(size);
    config.block[i] = record.block[i];
  }

  CUtensorMap maps[kMaxMaps];
  for (size_t i = 0; i < record.maps.size(); ++i) {
    const MapRecord& map = record.maps[i];
    if (ffi::Error error = EncodeMap(record, map, bounds[map.buffer], dims, &maps[i]); error.failure()) return error;
  }
  ScalarValue scalars[kMaxParams];
  for (size_t i = 0; i < record.scalars.size(); ++i) {
    if (ffi::Error error = ReadScalar(record, record.scalars[i], attributes, &scalars[i]); error.failure())
      return error;
  }
  ScalarValue integers[kMaxParams];
  void* params[kMaxParams];
  for (size_t i = 0; i < record.params.size(); ++i) {
    const ParamRecord& param = record.params[i];
    switch (param.kind) {
      case ParamRecord::Kind::kMap:
        params[i] = &maps[param.index];
        break;
      case ParamRecord::Kind::kBuffer:
        params[i] = &bounds[param.index].data;
        break;
      case ParamRecord::Kind::kScalar:
        params[i] = &scalars[param.index];
        break;
      case ParamRecord::Kind::kInt32:
      case ParamRecord::Kind::kInt64: {
        int64_t value = 0;
        const bool narrow = param.kind == ParamRecord::Kind::kInt32;
        if (!param.expression.Evaluate(dims, &value) || (narrow && (value < INT32_MIN || value > INT32_MAX))) {
          return Invalid(record.name,
                         "parameter " + param.expression.text() + " must fit its type, got " + std::to_string(value));
        }
        if (narrow) {
          integers[i].i32 = static_cast<int32_t>(value);
        } else {
          integers[i].i64 = value;
        }
        params[i] = &integers[i];
        break;
      }
    }
  }

  CUlaunchAttribute launch_attributes[3];
  std::memset(launch_attributes, 0, sizeof(launch_attributes));
  config.attributes = launch_attributes;
  const auto add = [&](int id) -> CUlaunchAttributeValue& {
    CUlaunchAttribute& attribute = launch_attributes[config.num_attributes++];
    attribute.id = id;
    return attribute.value;
  };
  if (record.overlap) add(kLaunchProgrammaticStreamSerialization).programmatic_stream_serialization_allowed = 1;
  if (record.cooperative) add(kLaunchCooperative).cooperative = 1;
  if (record.cluster[0] * record.cluster[1] * record.cluster[2] > 1) {
    add(kLaunchClusterDimension).cluster_dim = {record.cluster[0], record.cluster[1], record.cluster[2]};
  }
  config.shared_bytes = record.shared_bytes;
  config.stream = stream;

  DeviceScope scope;
  if (CUresult result = scope.Enter(ordinal); result != kCudaSuccess) {
    return Fail(ffi::ErrorCode::kInternal, record.name, "device context: " + ResultName(result));
  }
  CUfunction function;
  if (ffi::Error error = Load(kernel, ordinal, &function); error.failure()) return error;
  JAXQLA_CUDA(record.name, LaunchKernelEx(&config, function, params, nullptr));
  return ffi::Error::Success();
}

ffi::Error Execute(CUstream stream, int32_t ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary attributes) {
  const ffi::ErrorOr<Kernel*> kernel = Find(attributes);
  if (kernel.has_error()) return kernel.error();
  if (ffi::Error error = CheckOrdinal((*kernel)->record, ordinal); error.failure()) return error;
  try {
    return Launch(**kernel, stream, ordinal, args, rets, attributes);
  } catch (const std::exception& error) {
    return Fail(ffi::ErrorCode::kInternal, (*kernel)->record.name, error.what());
  }
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxqla_launch_initialize, Initialize,
                              ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxqla_launch_execute, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});
#pragma GCC visibility pop

}  // namespace jaxqla
