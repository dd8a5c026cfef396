// JSON objects: of saved states, schedules and records.
#pragma once

#include <simdjson.h>

#include <new>
#include <optional>
#include <string_view>

namespace shardow::base {

/// The object that `json` is, valid as long as `parser`; nothing: it is none. Throws std::bad_alloc: no memory is no
/// fault of the text.
inline std::optional<simdjson::dom::object> object_in(simdjson::dom::parser& parser, std::string_view json) {
  const simdjson::padded_string padded(json);
  if (padded.data() == nullptr) throw std::bad_alloc();
  simdjson::dom::object object;
  const simdjson::error_code error = parser.parse(padded).get(object);
  if (error == simdjson::MEMALLOC) throw std::bad_alloc();
  if (error != simdjson::SUCCESS) return std::nullopt;
  return object;
}

}  // namespace shardow::base
