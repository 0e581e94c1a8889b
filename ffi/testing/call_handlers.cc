// Calls the handlers of a built library as XLA does, for tests: call_handlers LIBRARY, then commands on standard input.
//
//   stage initialize|execute      device ORDINAL
//   operand DTYPE RANK SIZE...    result DTYPE RANK SIZE...    same OPERAND RESULT (they share one buffer)
//   string NAME VALUE             float32|float64|int32|int64 NAME VALUE (attributes)
//   run [THREADS]                 prints `ok` or `CODE MESSAGE`, once a thread
//   clear                         forgets operands, results and attributes
//   metadata                      prints what XLA asks of the handlers when they are registered
//
// Written so that it compiles with the headers of every jaxlib supported: it names no type that some of them lack.
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  int code;
  std::string message;
};

namespace {

struct Buffer {
  XLA_FFI_DataType type;
  std::vector<int64_t> dims;
  void* data;
};

struct Attribute {
  std::string name, text;
  XLA_FFI_AttrType kind;
  XLA_FFI_DataType type;
  union {
    float f32;
    double f64;
    int32_t i32;
    int64_t i64;
  };
};

struct Call {
  bool execute = true;
  int32_t device = 0;
  std::vector<Buffer> operands, results;
  std::deque<Attribute> attributes;
};

XLA_FFI_DataType Type(const std::string& name) {
  if (name == "bfloat16") return XLA_FFI_DataType_BF16;
  if (name == "float16") return XLA_FFI_DataType_F16;
  if (name == "float32") return XLA_FFI_DataType_F32;
  if (name == "float64") return XLA_FFI_DataType_F64;
  if (name == "int32") return XLA_FFI_DataType_S32;
  if (name == "int64") return XLA_FFI_DataType_S64;
  if (name == "bool") return XLA_FFI_DataType_PRED;
  std::cerr << "no dtype " << name << "\n";
  std::exit(2);
}

const XLA_FFI_Api* Api() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api api{};
    api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return new XLA_FFI_Error{static_cast<int>(args->errc), args->message};
    };
    api.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
    api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
      args->stream = reinterpret_cast<void*>(0xabc0);
      return nullptr;
    };
    api.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) -> XLA_FFI_Error* {
      args->device_ordinal = reinterpret_cast<const Call*>(args->ctx)->device;
      return nullptr;
    };
    return api;
  }();
  return &api;
}

XLA_FFI_CallFrame Frame(const Call& call) {
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = Api();
  frame.ctx = reinterpret_cast<decltype(frame.ctx)>(const_cast<Call*>(&call));
  frame.stage = call.execute ? XLA_FFI_ExecutionStage_EXECUTE : XLA_FFI_ExecutionStage_INITIALIZE;
  frame.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
  frame.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
  frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
  return frame;
}

std::vector<XLA_FFI_Buffer> Buffers(const std::vector<Buffer>& buffers) {
  std::vector<XLA_FFI_Buffer> out;
  for (const Buffer& buffer : buffers) {
    XLA_FFI_Buffer made{};
    made.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    made.dtype = buffer.type;
    made.data = buffer.data;
    made.rank = static_cast<int64_t>(buffer.dims.size());
    made.dims = const_cast<int64_t*>(buffer.dims.data());
    out.push_back(made);
  }
  return out;
}

void Run(XLA_FFI_Handler* handler, const Call& call) {
  XLA_FFI_CallFrame frame = Frame(call);
  std::vector<XLA_FFI_Buffer> operands = Buffers(call.operands), results = Buffers(call.results);
  std::vector<void*> args, rets, attrs;
  for (auto& buffer : operands) args.push_back(&buffer);
  for (auto& buffer : results) rets.push_back(&buffer);
  std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);
  std::vector<XLA_FFI_AttrType> attr_types;
  std::deque<XLA_FFI_ByteSpan> texts;
  std::deque<XLA_FFI_Scalar> scalars;
  std::vector<XLA_FFI_ByteSpan*> names;
  for (const Attribute& attribute : call.attributes) {
    names.push_back(&texts.emplace_back(XLA_FFI_ByteSpan{attribute.name.data(), attribute.name.size()}));
    attr_types.push_back(attribute.kind);
    if (attribute.kind == XLA_FFI_AttrType_STRING) {
      attrs.push_back(&texts.emplace_back(XLA_FFI_ByteSpan{attribute.text.data(), attribute.text.size()}));
    } else {
      attrs.push_back(&scalars.emplace_back(XLA_FFI_Scalar{attribute.type, const_cast<int64_t*>(&attribute.i64)}));
    }
  }
  frame.args.size = static_cast<int64_t>(args.size());
  frame.args.types = arg_types.data();
  frame.args.args = args.data();
  frame.rets.size = static_cast<int64_t>(rets.size());
  frame.rets.types = ret_types.data();
  frame.rets.rets = rets.data();
  frame.attrs.size = static_cast<int64_t>(attrs.size());
  frame.attrs.types = attr_types.data();
  frame.attrs.names = names.data();
  frame.attrs.attrs = attrs.data();
  XLA_FFI_Error* error = handler(&frame);
  if (error == nullptr) {
    std::printf("ok\n");
  } else {
    std::printf("%d %s\n", error->code, error->message.c_str());
    delete error;
  }
}

void PrintMetadata(const char* name, XLA_FFI_Handler* handler) {
  XLA_FFI_Metadata metadata{};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  metadata.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension{};
  extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame = Frame({});
  frame.extension_start = &extension.extension_base;
  if (handler(&frame) != nullptr) std::exit(2);
  std::printf("%s api %d.%d traits %u\n", name, metadata.api_version.major_version, metadata.api_version.minor_version,
              metadata.traits);
}

}  // namespace

int main(int count, char** arguments) {
  void* library = count == 2 ? dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (library == nullptr) {
    std::cerr << "call_handlers LIBRARY: " << (count == 2 ? dlerror() : "no library") << "\n";
    return 2;
  }
  auto* initialize = reinterpret_cast<XLA_FFI_Handler*>(dlsym(library, "jaxqla_launch_initialize"));
  auto* execute = reinterpret_cast<XLA_FFI_Handler*>(dlsym(library, "jaxqla_launch_execute"));
  if (initialize == nullptr || execute == nullptr) return 2;

  Call call;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream fields(line);
    std::string command, name;
    if (!(fields >> command)) continue;
    if (command == "stage") {
      call.execute = fields >> name && name == "execute";
    } else if (command == "device") {
      fields >> call.device;
    } else if (command == "operand" || command == "result") {
      const bool operand = command == "operand";
      std::vector<Buffer>& buffers = operand ? call.operands : call.results;
      size_t rank = 0;
      fields >> name >> rank;
      Buffer buffer{Type(name), std::vector<int64_t>(rank), nullptr};
      bool empty = false;
      for (int64_t& size : buffer.dims) {
        fields >> size;
        empty = empty || size == 0;
      }
      // Addresses that the recorded calls show again; an empty buffer has none.
      if (!empty) buffer.data = reinterpret_cast<void*>((operand ? 0x1000 : 0x100000) * (buffers.size() + 1));
      buffers.push_back(buffer);
    } else if (command == "same") {
      size_t operand = 0, result = 0;
      fields >> operand >> result;
      call.results.at(result).data = call.operands.at(operand).data;
    } else if (command == "string" || command == "float32" || command == "float64" || command == "int32" ||
               command == "int64") {
      Attribute attribute{};
      fields >> attribute.name;
      attribute.kind = command == "string" ? XLA_FFI_AttrType_STRING : XLA_FFI_AttrType_SCALAR;
      if (command == "string") {
        fields >> attribute.text;
      } else {
        attribute.type = Type(command);
        if (command == "float32") fields >> attribute.f32;
        if (command == "float64") fields >> attribute.f64;
        if (command == "int32") fields >> attribute.i32;
        if (command == "int64") fields >> attribute.i64;
      }
      call.attributes.push_back(attribute);
      // XLA passes attributes in the order of their names, and handlers may rely on it.
      std::sort(call.attributes.begin(), call.attributes.end(),
                [](const Attribute& a, const Attribute& b) { return a.name < b.name; });
    } else if (command == "run") {
      int threads = 1;
      if (!(fields >> threads)) threads = 1;
      std::vector<std::thread> running;
      for (int i = 0; i < threads; ++i) running.emplace_back(Run, call.execute ? execute : initialize, std::cref(call));
      for (std::thread& thread : running) thread.join();
    } else if (command == "clear") {
      call = Call{};
    } else if (command == "metadata") {
      PrintMetadata("initialize", initialize);
      PrintMetadata("execute", execute);
    } else {
      std::cerr << "no command " << command << "\n";
      return 2;
    }
  }
}
