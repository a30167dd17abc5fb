// The CPU as the device of the operators, in place of csrc/common/device.h: tensors lie in host memory, and kernels are
// compiled from the text of csrc/ by SYCL's runtime, each once per process, and found by their names.
//
// Traps of that runtime: a queue that is destroyed at exit aborts, so everything here is leaked.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <sycl/sycl.hpp>
#include <vector>

namespace ds_xpu {

inline constexpr const char* kDeviceName = "cpu";

inline int32_t device_type() { return aoti_torch_device_type_cpu(); }

inline sycl::queue& current_queue(int32_t) {
    static sycl::queue* const queue = new sycl::queue(sycl::cpu_selector_v, sycl::property::queue::in_order{});
    return *queue;
}

using Kernels = sycl::kernel_bundle<sycl::bundle_state::executable>;

inline std::string text_of(const std::filesystem::path& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// The header below DS_XPU_CSRC that has the kernel `name`, as a program by itself.
inline Kernels compile_kernel(const std::string& name) {
    namespace syclex = sycl::ext::oneapi::experimental;
    const std::filesystem::path root = DS_XPU_CSRC;
    std::string program;
    syclex::include_files headers;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
        if (entry.path().extension() != ".h") continue;
        const std::string text = text_of(entry.path()), header = std::filesystem::relative(entry.path(), root).string();
        headers.add(header, text);
        if (text.find("DS_XPU_KERNEL void " + name + "(") != std::string::npos)
            program = "#include \"" + header + "\"\n";
    }
    if (program.empty()) throw std::runtime_error("no header of " + root.string() + " has the kernel " + name);
    auto source = syclex::create_kernel_bundle_from_source(
        current_queue(0).get_context(), syclex::source_language::sycl, program, syclex::properties{headers});
    const std::vector<std::string> flags{"-DDS_XPU_FREE_FUNCTIONS", "-std=c++20", "-I."};
    return syclex::build(source, syclex::properties{syclex::build_options{flags}});
}

inline sycl::kernel kernel_named(const std::string& name) {
    static auto* const compiled = new std::map<std::string, Kernels>();
    auto found = compiled->find(name);
    if (found == compiled->end()) found = compiled->emplace(name, compile_kernel(name)).first;
    return found->second.ext_oneapi_get_kernel(name);
}

template <typename Args>
void launch(sycl::queue& queue, const char* name, int64_t num_groups, int64_t group_size, const Args& args) {
    const sycl::nd_range<1> range(static_cast<size_t>(num_groups * group_size), static_cast<size_t>(group_size));
    const sycl::kernel kernel = kernel_named(name);
    queue
        .submit([&](sycl::handler& handler) {
            handler.set_arg(0, args);
            handler.parallel_for(range, kernel);
        })
        .wait_and_throw();
}

}  // namespace ds_xpu

#define DS_XPU_LAUNCH(queue, kernel, num_groups, group_size, args) \
    ::ds_xpu::launch(queue, #kernel, num_groups, group_size, args)
