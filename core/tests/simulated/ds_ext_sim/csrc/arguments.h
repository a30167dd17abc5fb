// The arguments of an operator with tensors of the host in place of the device's.

#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include <optional>
#include <vector>

#include "tensors.h"

namespace sim {

using torch::jit::Stack;

// What stands for a tensor of the device: its own bytes, or as many that are zero.
enum class Stand { kBytes, kZeros };

struct Replaced {
    at::Tensor original;
    at::Tensor host;
    const c10::StorageImpl* storage;  // of `host`, before the call
    const void* bytes;                // of that storage, before the call
    bool written;
};

class Arguments {
  public:
    // `given`: one value per argument of the schema. Views of one storage stay views of one storage.
    Arguments(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> given, int device, Stand stand);

    Stack values;
    std::vector<Replaced> tensors;
    std::optional<size_t> generator;  // where a generator is among the values: the host's that the device draws from

    // What stands for a tensor that is `host`, or nullptr.
    const Replaced* find(const at::Tensor& host) const;
    // What stands for a tensor of the storage of `host`, or nullptr.
    const Replaced* find_storage(const at::Tensor& host) const;

  private:
    Stand stand_;

    c10::IValue replaced(const c10::IValue& value, bool written);
    at::Tensor host_of(const at::Tensor& tensor, bool written);
};

// Whether the operator writes the argument.
inline bool is_written(const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

}  // namespace sim
