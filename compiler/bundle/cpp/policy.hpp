// The policy with its recurrent state, in libtorch: model.pt2 through torch's own loader, on one thread.
#pragma once

#include "interface.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/version.h>

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace policy {

// Throws std::runtime_error unless the package is this contract's and may run here; nothing of it is loaded. Code for
// registers that the processor lacks would end the process.
inline void check_package(const std::string &package)
{
    if (!std::ifstream(package)) { throw std::runtime_error(package + " cannot be read"); }
    auto recorded = torch::inductor::AOTIModelPackageLoader::load_metadata_from_package(package, "model");
    if (recorded["contract_hash"] != contract_hash) {
        throw std::runtime_error(package + " belongs to another contract");
    }
    const std::string torch = recorded["torch"].substr(0, recorded["torch"].find('+'));
    if (torch != TORCH_VERSION) {
        throw std::runtime_error(package + " is for torch " + torch + ", this program is built with " TORCH_VERSION
                                 ": build it with that torch, or export the bundle again with this one");
    }
    const std::string &set = recorded["instruction_set"];
    const std::string here = at::get_cpu_capability();
    const std::vector<std::string> order = {"DEFAULT", "AVX2", "AVX512"};
    const auto wanted = std::find(order.begin(), order.end(), set);
    const auto found = std::find(order.begin(), order.end(), here);
    if (here != set && (wanted == order.end() || found == order.end() || found < wanted)) {
        throw std::runtime_error(package + " is for a processor with " + set + ", this one has " + here +
                                 ": export the bundle again on this kind of processor");
    }
}

class Policy {
public:
    // Loads BUNDLE/model.pt2, once `check_package` has passed.
    explicit Policy(const std::string &bundle)
    {
        const std::string package = bundle + "/model.pt2";
        check_package(package);
        at::set_num_threads(1);
        loader_ = std::make_unique<torch::inductor::AOTIModelPackageLoader>(package, "model", true);
        reset();
    }

    // The start of an episode: recurrent values as the contract puts them.
    void reset()
    {
        state_.clear();
        for (const Port &port : inputs) {
            if (port.follows < 0) { continue; }
            const at::Tensor initial = at::tensor(port.initial, at::kDouble).to(port.dtype);
            state_.push_back(initial.numel() == 1 ? initial.reshape({}).expand(port.shape).clone()
                                                  : initial.reshape(port.shape));
        }
    }

    // Observations in the order of `inputs`, recurrent values left out; returns all of `outputs`, in their order.
    std::vector<at::Tensor> step(const std::vector<at::Tensor> &observations)
    {
        std::vector<at::Tensor> row;
        std::size_t seen = 0;
        std::size_t kept = 0;
        for (const Port &port : inputs) {
            if (port.follows >= 0) {
                row.push_back(state_[kept++]);
            } else if (seen < observations.size()) {
                row.push_back(observations[seen++]);
            }
        }
        if (seen != observations.size()) { throw std::invalid_argument("more observations than the policy reads"); }
        std::vector<at::Tensor> result = run(row);
        kept = 0;
        for (const Port &port : inputs) {
            if (port.follows >= 0) { state_[kept++] = result[static_cast<std::size_t>(port.follows)]; }
        }
        return result;
    }

    // Every input, recurrent values among them, to every output; the state that `step` keeps is left alone.
    // The compiled code trusts its arguments, so shape and dtype are checked here.
    std::vector<at::Tensor> run(const std::vector<at::Tensor> &row)
    {
        if (row.size() != inputs.size()) {
            throw std::invalid_argument("expected " + std::to_string(inputs.size()) + " inputs, found " +
                                        std::to_string(row.size()));
        }
        const c10::InferenceMode no_gradients;
        std::vector<at::Tensor> arguments;
        for (std::size_t i = 0; i < row.size(); ++i) {
            const Port &port = inputs[i];
            if (row[i].sizes() != at::IntArrayRef(port.shape) || row[i].scalar_type() != port.dtype) {
                std::ostringstream text;
                text << port.key << ": expected " << at::toString(port.dtype) << at::IntArrayRef(port.shape)
                     << ", found " << at::toString(row[i].scalar_type()) << row[i].sizes();
                throw std::invalid_argument(text.str());
            }
            arguments.push_back(row[i].contiguous());
        }
        return loader_->run(arguments);
    }

private:
    std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader_;
    std::vector<at::Tensor> state_;
};

} // namespace policy
