// Replays the golden vectors: runner BUNDLE. Exit code 1 where an error is beyond the bundle's tolerance, 2 where the
// bundle cannot be run here.
#include "policy.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <fstream>
#include <iostream>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// cpp/golden.bin: the contract's hash; rows; steps. Little-endian: inputs in their dtype, outputs as double.
class Golden {
public:
    explicit Golden(const std::string &file) : stream_(file, std::ios::binary), file_(file)
    {
        std::string hash(std::string(policy::contract_hash).size(), ' ');
        read(hash.data(), hash.size());
        if (hash != policy::contract_hash) { throw std::runtime_error(file + " belongs to another contract"); }
    }

    bool flag()
    {
        std::uint8_t value = 0;
        read(&value, 1);
        return value != 0;
    }

    at::Tensor tensor(const policy::Port &port, const at::ScalarType dtype)
    {
        at::Tensor value = at::empty(port.shape, dtype);
        read(value.data_ptr(), value.nbytes());
        return value;
    }

private:
    void read(void *const into, const std::size_t bytes)
    {
        stream_.read(static_cast<char *>(into), static_cast<std::streamsize>(bytes));
        if (!stream_) { throw std::runtime_error(file_ + " cannot be read, or is too short"); }
    }

    std::ifstream stream_;
    std::string file_;
};

struct Worst {
    double error = 0.0;
    std::string where = "nowhere";

    // A part of the output's usual size, or of the row's own where larger; NaN counts as infinite.
    void compare(const at::Tensor &found, const at::Tensor &wanted, const policy::Port &port, const std::string &at)
    {
        if (wanted.numel() == 0) { return; }
        const double apart = (found.to(at::kDouble).reshape(wanted.sizes()) - wanted).abs().max().item<double>();
        const double size = std::max(port.scale, wanted.abs().max().item<double>());
        const double by = at::isFloatingType(port.dtype) ? apart / size : apart != 0.0;
        if (by <= error) { return; }
        error = std::isnan(by) ? std::numeric_limits<double>::infinity() : by;
        where = at + ", " + port.key;
    }
};

bool carried(const policy::Port &output)
{
    for (const policy::Port &input : policy::inputs) {
        if (input.follows >= 0 && &policy::outputs[static_cast<std::size_t>(input.follows)] == &output) { return true; }
    }
    return false;
}

Worst rows(policy::Policy &runtime, Golden &golden)
{
    Worst worst;
    for (int row = 0; row < policy::golden_rows; ++row) {
        std::vector<at::Tensor> values;
        for (const auto &port : policy::inputs) { values.push_back(golden.tensor(port, port.dtype)); }
        const auto found = runtime.run(values);
        for (std::size_t i = 0; i < found.size(); ++i) {
            const auto &port = policy::outputs[i];
            worst.compare(found[i], golden.tensor(port, at::kDouble), port, "row " + std::to_string(row));
        }
    }
    return worst;
}

Worst sequence(policy::Policy &runtime, Golden &golden)
{
    Worst worst;
    for (int step = 0; step < policy::golden_steps; ++step) {
        if (golden.flag()) { runtime.reset(); }
        std::vector<at::Tensor> values;
        for (const auto &port : policy::inputs) {
            if (port.follows < 0) { values.push_back(golden.tensor(port, port.dtype)); }
        }
        const auto found = runtime.step(values);
        for (std::size_t i = 0; i < found.size(); ++i) {
            const auto &port = policy::outputs[i];
            if (carried(port)) { continue; }
            worst.compare(found[i], golden.tensor(port, at::kDouble), port, "step " + std::to_string(step));
        }
    }
    return worst;
}

void report(const char *const what, const int number, const Worst &worst)
{
    std::cout << number << ' ' << what << ": largest error " << worst.error << " of the usual size, " << worst.where
              << '\n';
}

} // namespace

int main(const int argc, char **const argv)
{
    const std::string bundle = argc > 1 ? argv[1] : ".";
    try {
        policy::Policy runtime(bundle);
        Golden golden(bundle + "/cpp/golden.bin");
        const Worst single = rows(runtime, golden);
        const Worst along = sequence(runtime, golden);
        report("rows", policy::golden_rows, single);
        if (policy::golden_steps > 0) { report("steps of the sequence", policy::golden_steps, along); }
        return single.error <= policy::tolerance && along.error <= policy::tolerance ? 0 : 1;
    } catch (const std::exception &error) {
        std::cerr << error.what() << '\n';
        return 2;
    }
}
