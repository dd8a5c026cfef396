#include "merge/plan.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>
#include <utility>

#include "base/errors.h"
#include "base/version.h"
#include "file/json.h"
#include "merge/rules.h"
#include "tensor/dtype.h"

namespace shardow::merging {
namespace {

using base::fail;

std::vector<std::string> names_of(const MergeInput& input) {
  if (const auto* const opened = std::get_if<Checkpoint>(&input.tensors)) return opened->names();
  return std::get<1>(input.tensors)->names();
}

std::pair<DType, Shape> tensor_of(const MergeInput& input, std::string_view name) {
  if (const auto* const source = std::get_if<1>(&input.tensors)) return (*source)->tensor(name);
  StoredTensor stored = std::get<Checkpoint>(input.tensors).tensor(name);
  return {stored.dtype, std::move(stored.shape)};
}

bool is_wide(DType dtype) {
  return is_floating(dtype) && dtype_bits(dtype) >= 16;
}

constexpr double kMostCoefficient = 1e100;  // sums of what any float32 can hold stay within float64's range
constexpr int kMostThreads = 8;             // some 5 MiB each; disks and memory give no more to more of them

void check(const std::vector<MergeInput>& inputs) {
  if (inputs.empty()) fail(Code::kInvalidArgument, "nothing to merge: no inputs");
  bool any = false;
  for (const MergeInput& input : inputs) {
    if (!(std::abs(input.coefficient) <= kMostCoefficient))
      fail(Code::kInvalidArgument, "{} has the coefficient {}: it must be a number of at most {} in size", input.name,
           input.coefficient, kMostCoefficient);
    if (const auto* const source = std::get_if<1>(&input.tensors); source != nullptr && *source == nullptr)
      fail(Code::kInvalidArgument, "{} has no source: it is null", input.name);
    if (input.step) check_step(*input.step);
    any = any || input.coefficient != 0;
  }
  if (!any) fail(Code::kInvalidArgument, "nothing to merge: the coefficients of all inputs are 0");
}

/// By (step, name, coefficient).
std::vector<MergeInput> in_order(std::vector<MergeInput> inputs) {
  const auto key = [](const MergeInput& input) { return std::tie(input.step, input.name, input.coefficient); };
  std::stable_sort(inputs.begin(), inputs.end(),
                   [&](const MergeInput& a, const MergeInput& b) { return key(a) < key(b); });
  return inputs;
}

}  // namespace

Plan::Plan(std::vector<MergeInput> inputs, std::optional<DType> dtype) : dtype_(dtype) {
  check(inputs);
  inputs[newest_of(inputs)].newest = true;  // of all of them, before those that have no coefficient are gone
  for (MergeInput& input : in_order(std::move(inputs))) {
    if (input.newest) newest_ = inputs_.size();
    if (input.newest || input.coefficient != 0) inputs_.push_back(std::move(input));
  }
  if (dtype && !is_wide(*dtype))
    fail(Code::kInvalidArgument, "dtype {}: a merge is F64, F32, F16 or BF16", dtype_name(*dtype));
  std::vector<std::set<std::string>> names;
  std::set<std::string> all;
  for (const MergeInput& input : inputs_) {
    const std::vector<std::string> has = names_of(input);
    names.emplace_back(has.begin(), has.end());
    all.insert(has.begin(), has.end());
  }
  std::vector<std::string> unfit, unsupported;
  for (const std::string& name : all) {
    std::vector<std::string> without;
    for (size_t j = 0; j < inputs_.size(); ++j) {
      if (!names[j].contains(name)) without.push_back(inputs_[j].name);
    }
    if (without.empty()) {
      add(name, unfit, unsupported);
    } else {
      unfit.push_back(fmt::format("'{}' is missing in {}", name, fmt::join(without, ", ")));
    }
  }
  if (!unfit.empty())
    fail(Code::kInvalidArgument, "the inputs do not fit together, nothing was merged: {}", fmt::join(unfit, "; "));
  if (!unsupported.empty())
    fail(Code::kUnsupported, "element types below 16 bits are not averaged, nothing was merged: {}",
         fmt::join(unsupported, "; "));
}

void Plan::add(std::string_view name, std::vector<std::string>& unfit, std::vector<std::string>& unsupported) {
  const MergeInput& newest = inputs_[newest_];
  const auto [dtype, shape] = tensor_of(newest, name);
  Tensor tensor{std::string(name), shape, dtype, is_floating(dtype) || dtype == DType::kC64, {}};
  for (const MergeInput& input : inputs_) {
    const auto [other, other_shape] = tensor_of(input, name);
    tensor.types.push_back(other);
    if (other_shape != shape) {
      unfit.push_back(fmt::format("'{}' has shape [{}] in {} and [{}] in {}", name, fmt::join(other_shape, ", "),
                                  input.name, fmt::join(shape, ", "), newest.name));
    } else if (other != dtype && !(is_wide(other) && is_wide(dtype))) {
      unfit.push_back(fmt::format("'{}' is {} in {} and {} in {}", name, dtype_name(other), input.name,
                                  dtype_name(dtype), newest.name));
    } else if (other != dtype && !dtype_) {
      unfit.push_back(fmt::format("'{}' is {} in {} and {} in {} (say which dtype the merge is to have)", name,
                                  dtype_name(other), input.name, dtype_name(dtype), newest.name));
    }
  }
  if (is_floating(dtype) && !is_wide(dtype)) unsupported.push_back(fmt::format("'{}' is {}", name, dtype_name(dtype)));
  if (dtype_ && is_wide(dtype)) tensor.dtype = *dtype_;
  tensors_.push_back(std::move(tensor));
}

std::optional<size_t> Plan::find(std::string_view name) const {
  const auto found = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                      [](const Tensor& a, std::string_view b) { return a.name < b; });
  if (found == tensors_.end() || found->name != name) return std::nullopt;
  return static_cast<size_t>(found - tensors_.begin());
}

std::string Plan::provenance(const std::string& formula) const {
  std::string out = fmt::format(R"({{"version":"{}","formula":)", base::version());
  file::append_json_text(out, formula);
  if (const auto step = inputs_[newest_].step) out += fmt::format(R"(,"step":{})", *step);
  out += R"(,"inputs":[)";
  for (const MergeInput& input : inputs_) {
    out += &input == &inputs_.front() ? R"({"name":)" : R"(,{"name":)";
    file::append_json_text(out, input.name);
    if (input.step) out += fmt::format(R"(,"step":{})", *input.step);
    out += fmt::format(R"(,"coefficient":{}}})", input.coefficient);
  }
  out += R"(],"newest":)";
  file::append_json_text(out, inputs_[newest_].name);
  return out + "}";
}

int Plan::threads(int wanted) const {
  const auto asks_for_one = [](const MergeInput& input) {
    const auto* const source = std::get_if<1>(&input.tensors);
    return source != nullptr && (*source)->one_at_a_time();
  };
  return std::any_of(inputs_.begin(), inputs_.end(), asks_for_one) ? 1 : std::min(wanted, kMostThreads);
}

MergeReport Plan::report() const {
  MergeReport report;
  report.newest = inputs_[newest_].name;
  for (const MergeInput& input : inputs_) {
    report.inputs.push_back({input.name, input.step, input.coefficient});
    report.sum += input.coefficient;
  }
  for (const Tensor& tensor : tensors_) (tensor.averaged ? report.averaged : report.taken).push_back(tensor.name);
  return report;
}

}  // namespace shardow::merging
