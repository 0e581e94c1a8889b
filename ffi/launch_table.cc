#include "launch_table.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <optional>
#include <utility>

namespace jaxqla {
namespace {

constexpr std::string_view kHeader = "jaxqla-launch-table";
constexpr int64_t kVersion = 1;

constexpr std::pair<std::string_view, DataType> kTypes[] = {
    {"int8", DataType::kInt8},       {"uint8", DataType::kUint8},       {"int32", DataType::kInt32},
    {"uint32", DataType::kUint32},   {"int64", DataType::kInt64},       {"uint64", DataType::kUint64},
    {"float16", DataType::kFloat16}, {"bfloat16", DataType::kBfloat16}, {"float32", DataType::kFloat32},
    {"float64", DataType::kFloat64},
};

std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> fields;
  while (!text.empty()) {
    const size_t end = std::min(text.find(separator), text.size());
    if (end > 0) fields.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return fields;
}

std::optional<int64_t> ParseInteger(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

int64_t Integer(std::string_view text) {
  if (auto value = ParseInteger(text)) return *value;
  throw TableError("must hold an integer, got " + std::string(text));
}

unsigned Count(std::string_view text, int64_t low, int64_t high) {
  const int64_t value = Integer(text);
  if (value < low || value > high) {
    throw TableError("must hold a number in [" + std::to_string(low) + ", " + std::to_string(high) + "], got " +
                     std::string(text));
  }
  return static_cast<unsigned>(value);
}

DataType Type(std::string_view text) {
  for (const auto& [name, type] : kTypes) {
    if (name == text) return type;
  }
  throw TableError("must hold a known dtype, got " + std::string(text));
}

template <typename Record>
int IndexOf(const std::vector<Record>& records, std::string_view name, const char* what) {
  const auto found = std::find_if(records.begin(), records.end(), [&](const Record& r) { return r.name == name; });
  if (found == records.end()) throw TableError(std::string("must name a ") + what + ", got " + std::string(name));
  return static_cast<int>(found - records.begin());
}

int64_t FloorDivide(int64_t a, int64_t b) {
  const int64_t quotient = a / b;
  return (a % b != 0 && (a < 0) != (b < 0)) ? quotient - 1 : quotient;
}

// The lines of one kernel. Expressions wait until its dimensions are known.
class KernelReader {
 public:
  explicit KernelReader(std::string_view name) { kernel_.name = name; }

  void Add(const std::vector<std::string_view>& fields) {
    const std::string_view record = fields[0];
    // fields of a record, itself included; 0 where the number varies
    static constexpr std::pair<std::string_view, size_t> kSizes[] = {
        {"cubin", 2}, {"symbol", 2}, {"dim", 5},     {"scalar", 3},  {"param", 3},       {"grid", 4},
        {"block", 4}, {"shared", 2}, {"cluster", 4}, {"overlap", 2}, {"cooperative", 2},
    };
    for (const auto& [name, size] : kSizes) {
      if (name == record && fields.size() != size) {
        throw TableError("must have " + std::to_string(size) + " fields, got " + std::to_string(fields.size()));
      }
    }
    if (record == "cubin") {
      kernel_.cubin = fields[1];
    } else if (record == "symbol") {
      kernel_.symbol = fields[1];
    } else if (record == "buffer") {
      AddBuffer(fields);
    } else if (record == "dim") {
      const int buffer = IndexOf(kernel_.buffers, fields[2], "buffer");
      const int64_t rank = static_cast<int64_t>(shapes_[buffer].size());
      kernel_.dims.push_back(
          {std::string(fields[1]), buffer, static_cast<int>(Count(fields[3], 0, rank - 1)), Integer(fields[4])});
      dim_names_.emplace_back(fields[1]);
    } else if (record == "scalar") {
      kernel_.scalars.push_back({std::string(fields[1]), Type(fields[2])});
    } else if (record == "map") {
      AddMap(fields);
    } else if (record == "param") {
      AddParam(fields[1], fields[2]);
    } else if (record == "grid") {
      for (int i = 0; i < 3; ++i) kernel_.grid[i] = Expression(fields[i + 1], dim_names_);
      has_grid_ = true;
    } else if (record == "block") {
      for (int i = 0; i < 3; ++i) kernel_.block[i] = Count(fields[i + 1], 1, 1024);
    } else if (record == "cluster") {
      for (int i = 0; i < 3; ++i) kernel_.cluster[i] = Count(fields[i + 1], 1, 16);
    } else if (record == "shared") {
      kernel_.shared_bytes = Count(fields[1], 0, 1 << 20);
    } else if (record == "overlap") {
      kernel_.overlap = Count(fields[1], 0, 1) != 0;
    } else if (record == "cooperative") {
      kernel_.cooperative = Count(fields[1], 0, 1) != 0;
    } else {
      throw TableError("must start with a known record, got " + std::string(record));
    }
  }

  KernelRecord Finish() {
    for (size_t i = 0; i < shapes_.size(); ++i) {
      for (const std::string& text : shapes_[i]) kernel_.buffers[i].shape.emplace_back(text, dim_names_);
    }
    if (kernel_.cubin.empty() || kernel_.symbol.empty() || !has_grid_ || kernel_.block[0] == 0) {
      throw TableError("must follow a cubin, a symbol, a grid and a block");
    }
    Limit("buffers", kernel_.buffers.size(), kMaxBuffers);
    Limit("dims", kernel_.dims.size(), kMaxDims);
    Limit("maps", kernel_.maps.size(), kMaxMaps);
    Limit("params", kernel_.params.size(), kMaxParams);
    kernel_.num_operands = CheckPlaces("operand", [](const BufferRecord& b) { return b.operand; });
    kernel_.num_results = CheckPlaces("result", [](const BufferRecord& b) { return b.result; });
    return std::move(kernel_);
  }

 private:
  static void Limit(const char* what, size_t size, size_t most) {
    if (size > most) {
      throw TableError(std::string("must follow at most ") + std::to_string(most) + " " + what + ", got " +
                       std::to_string(size));
    }
  }

  template <typename Place>
  int CheckPlaces(const char* what, Place place) const {
    std::vector<int> places;
    for (const BufferRecord& buffer : kernel_.buffers) {
      if (place(buffer) >= 0) places.push_back(place(buffer));
    }
    std::sort(places.begin(), places.end());
    for (size_t i = 0; i < places.size(); ++i) {
      if (places[i] != static_cast<int>(i)) {
        throw TableError(std::string("must follow one buffer for each ") + what + ", got none or two for " +
                         std::to_string(i));
      }
    }
    return static_cast<int>(places.size());
  }

  void AddBuffer(const std::vector<std::string_view>& fields) {
    if (fields.size() < 6) throw TableError("must have 6 fields or more, got " + std::to_string(fields.size()));
    const unsigned rank = Count(fields[5], 0, kMaxRank);
    if (fields.size() != 6 + rank) {
      throw TableError("must have " + std::to_string(6 + rank) + " fields, got " + std::to_string(fields.size()));
    }
    const int operand = static_cast<int>(Integer(fields[3]));
    const int result = static_cast<int>(Integer(fields[4]));
    kernel_.buffers.push_back({std::string(fields[1]), Type(fields[2]), operand, result, {}});
    shapes_.emplace_back(fields.begin() + 6, fields.end());
  }

  void AddMap(const std::vector<std::string_view>& fields) {
    if (fields.size() < 5) throw TableError("must have 5 fields or more, got " + std::to_string(fields.size()));
    MapRecord map;
    map.name = fields[1];
    map.buffer = IndexOf(kernel_.buffers, fields[2], "buffer");
    map.data_type = static_cast<int>(Integer(fields[3]));
    const size_t rank = Count(fields[4], 1, kMaxMapRank);
    const size_t expected = 5 + rank + (rank - 1) + rank + rank + 4;
    if (fields.size() != expected) {
      throw TableError("must have " + std::to_string(expected) + " fields, got " + std::to_string(fields.size()));
    }
    auto field = fields.begin() + 5;
    for (size_t i = 0; i < rank; ++i) map.shape.emplace_back(*field++, dim_names_);
    for (size_t i = 0; i + 1 < rank; ++i) map.strides.emplace_back(*field++, dim_names_);
    for (size_t i = 0; i < rank; ++i) map.box.push_back(Count(*field++, 1, 256));
    for (size_t i = 0; i < rank; ++i) map.element_strides.push_back(Count(*field++, 1, 8));
    map.interleave = static_cast<int>(Integer(*field++));
    map.swizzle = static_cast<int>(Integer(*field++));
    map.l2_promotion = static_cast<int>(Integer(*field++));
    map.oob_fill = static_cast<int>(Integer(*field++));
    kernel_.maps.push_back(std::move(map));
  }

  void AddParam(std::string_view kind, std::string_view value) {
    using Kind = ParamRecord::Kind;
    if (kind == "map") {
      kernel_.params.push_back({Kind::kMap, IndexOf(kernel_.maps, value, "map"), {}});
    } else if (kind == "buffer") {
      kernel_.params.push_back({Kind::kBuffer, IndexOf(kernel_.buffers, value, "buffer"), {}});
    } else if (kind == "scalar") {
      kernel_.params.push_back({Kind::kScalar, IndexOf(kernel_.scalars, value, "scalar"), {}});
    } else if (kind == "int32" || kind == "int64") {
      const Kind width = kind == "int32" ? Kind::kInt32 : Kind::kInt64;
      kernel_.params.push_back({width, -1, Expression(value, dim_names_)});
    } else {
      throw TableError("must hold a known kind of parameter, got " + std::string(kind));
    }
  }

  KernelRecord kernel_;
  std::vector<std::vector<std::string>> shapes_;
  std::vector<std::string> dim_names_;
  bool has_grid_ = false;
};

}  // namespace

std::string_view Name(DataType type) {
  for (const auto& [name, known] : kTypes) {
    if (known == type) return name;
  }
  return "?";
}

Expression::Expression(std::string_view text, const std::vector<std::string>& dims) : text_(text) {
  static constexpr std::pair<std::string_view, Op> kOps[] = {
      {"+", Op::kAdd},        {"-", Op::kSub},    {"*", Op::kMul},    {"//", Op::kDiv},
      {"%", Op::kMod},        {"min", Op::kMin},  {"max", Op::kMax},  {"<", Op::kLess},
      {"<=", Op::kLessEqual}, {"==", Op::kEqual}, {"?", Op::kSelect},
  };
  int depth = 0;
  for (std::string_view term : Split(text, ',')) {
    const auto op = std::find_if(std::begin(kOps), std::end(kOps), [&](const auto& o) { return o.first == term; });
    if (op != std::end(kOps)) {
      const int arity = op->second == Op::kSelect ? 3 : 2;
      if (depth < arity) throw TableError("must hold an expression, got too few terms in " + text_);
      depth -= arity - 1;
      terms_.push_back({op->second, 0});
      continue;
    }
    if (++depth > kMaxStack) throw TableError("must hold a shallower expression, got " + text_);
    if (auto constant = ParseInteger(term)) {
      terms_.push_back({Op::kConstant, *constant});
      continue;
    }
    const auto dim = std::find(dims.begin(), dims.end(), term);
    if (dim == dims.end()) throw TableError("must name a dim, got " + std::string(term) + " in " + text_);
    terms_.push_back({Op::kDim, dim - dims.begin()});
  }
  if (depth != 1) throw TableError("must hold one expression, got " + text_);
}

bool Expression::Evaluate(const int64_t* dims, int64_t* value) const {
  int64_t stack[kMaxStack];
  int top = -1;
  for (const Term& term : terms_) {
    if (term.op == Op::kConstant || term.op == Op::kDim) {
      stack[++top] = term.op == Op::kConstant ? term.value : dims[term.value];
      continue;
    }
    if (term.op == Op::kSelect) {
      top -= 2;
      stack[top] = stack[top] != 0 ? stack[top + 1] : stack[top + 2];
      continue;
    }
    const int64_t b = stack[top--];
    const int64_t a = stack[top];
    int64_t& out = stack[top];
    bool overflow = false;
    switch (term.op) {
      case Op::kAdd:
        overflow = __builtin_add_overflow(a, b, &out);
        break;
      case Op::kSub:
        overflow = __builtin_sub_overflow(a, b, &out);
        break;
      case Op::kMul:
        overflow = __builtin_mul_overflow(a, b, &out);
        break;
      case Op::kDiv:
        out = b == 0 ? 0 : FloorDivide(a, b);
        break;
      case Op::kMod:
        out = b == 0 ? 0 : a - FloorDivide(a, b) * b;
        break;
      case Op::kMin:
        out = std::min(a, b);
        break;
      case Op::kMax:
        out = std::max(a, b);
        break;
      case Op::kLess:
        out = a < b;
        break;
      case Op::kLessEqual:
        out = a <= b;
        break;
      case Op::kEqual:
        out = a == b;
        break;
      default:
        return false;
    }
    if (overflow) return false;
  }
  *value = stack[0];
  return true;
}

Table ReadTable(std::string_view text) {
  Table table;
  std::optional<KernelReader> reader;
  int64_t number = 0;
  bool started = false;
  try {
    while (!text.empty()) {
      ++number;
      const size_t end = std::min(text.find('\n'), text.size());
      const std::vector<std::string_view> fields = Split(text.substr(0, end), ' ');
      text.remove_prefix(std::min(end + 1, text.size()));
      if (fields.empty()) continue;
      if (!started) {
        if (fields[0] != kHeader || fields.size() != 2) throw TableError("must be a jaxqla launch table");
        if (Integer(fields[1]) != kVersion) {
          throw TableError("must hold version " + std::to_string(kVersion) + ", got " + std::string(fields[1]));
        }
        started = true;
      } else if (!reader) {
        if (fields[0] != "kernel" || fields.size() != 2) throw TableError("must start a kernel");
        reader.emplace(fields[1]);
      } else if (fields[0] == "end") {
        KernelRecord kernel = reader->Finish();
        reader.reset();
        std::string name = kernel.name;
        if (!table.emplace(name, std::move(kernel)).second) throw TableError("must not repeat kernel " + name);
      } else {
        reader->Add(fields);
      }
    }
    if (!started) throw TableError("must be a jaxqla launch table");
    if (reader) throw TableError("must end the kernel it started");
  } catch (const TableError& error) {
    throw TableError("jaxqla launch table: line " + std::to_string(number) + " " + error.what() + ".");
  }
  return table;
}

}  // namespace jaxqla
