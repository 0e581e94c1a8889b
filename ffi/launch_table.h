// The table of built kernels, as kernels/launch_table.py writes it: reading, and expressions over dimensions.
#ifndef JAXQLA_FFI_LAUNCH_TABLE_H_
#define JAXQLA_FFI_LAUNCH_TABLE_H_

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cuda_driver.h"

namespace jaxqla {

// Upper bounds, so that a call works in fixed memory. The reader refuses a table above them.
inline constexpr int kMaxBuffers = 32;
inline constexpr int kMaxRank = 8;
inline constexpr int kMaxDims = 32;
inline constexpr int kMaxMaps = 16;
inline constexpr int kMaxMapRank = 5;
inline constexpr int kMaxParams = 64;
inline constexpr int kMaxStack = 16;

class TableError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class DataType { kInt8, kUint8, kInt32, kUint32, kInt64, kUint64, kFloat16, kBfloat16, kFloat32, kFloat64 };

std::string_view Name(DataType type);

// A postfix expression, checked when it is read. Division by zero gives zero: it happens in empty calls only.
class Expression {
 public:
  Expression() = default;
  Expression(std::string_view text, const std::vector<std::string>& dims);

  // False where a number leaves int64.
  bool Evaluate(const int64_t* dims, int64_t* value) const;
  // The text as an error message shows it.
  const std::string& text() const { return text_; }

 private:
  enum class Op { kConstant, kDim, kAdd, kSub, kMul, kDiv, kMod, kMin, kMax, kLess, kLessEqual, kEqual, kSelect };
  struct Term {
    Op op;
    int64_t value;
  };
  std::vector<Term> terms_;
  std::string text_;
};

struct BufferRecord {
  std::string name;
  DataType type;
  int operand;  // index in the call, or -1
  int result;
  std::vector<Expression> shape;
};

struct DimRecord {
  std::string name;
  int buffer;
  int axis;
  int64_t offset;
};

struct ScalarRecord {
  std::string name;
  DataType type;
};

struct MapRecord {
  std::string name;
  int buffer;
  int data_type;
  std::vector<Expression> shape;
  std::vector<Expression> strides;
  std::vector<uint32_t> box;
  std::vector<uint32_t> element_strides;
  int interleave, swizzle, l2_promotion, oob_fill;
};

struct ParamRecord {
  enum class Kind { kMap, kBuffer, kScalar, kInt32, kInt64 };
  Kind kind;
  int index;              // of the map, buffer or scalar
  Expression expression;  // of an integer
};

struct KernelRecord {
  std::string name, cubin, symbol;
  std::vector<BufferRecord> buffers;
  std::vector<DimRecord> dims;
  std::vector<ScalarRecord> scalars;
  std::vector<MapRecord> maps;
  std::vector<ParamRecord> params;
  Expression grid[3];
  unsigned block[3] = {0, 0, 0};
  unsigned cluster[3] = {1, 1, 1};
  unsigned shared_bytes = 0;
  bool overlap = false;
  bool cooperative = false;
  int num_operands = 0;
  int num_results = 0;
};

using Table = std::map<std::string, KernelRecord, std::less<>>;

// Throws TableError, which names the line.
Table ReadTable(std::string_view text);

}  // namespace jaxqla

#endif  // JAXQLA_FFI_LAUNCH_TABLE_H_
