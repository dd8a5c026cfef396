#include "cli/manifest.h"

#include <algorithm>
#include <optional>

#include "base/errors.h"
#include "base/files.h"
#include "base/paths.h"
#include "cli/whole_text.h"

namespace shardow::cli {
namespace {

namespace fs = std::filesystem;
constexpr size_t kDigits = 64;

std::optional<std::string> unescaped(std::string_view name) {
  std::string out;
  for (size_t i = 0; i < name.size(); ++i) {
    if (name[i] != '\\') {
      out += name[i];
      continue;
    }
    if (++i == name.size()) return std::nullopt;
    switch (name[i]) {
      case 'n': out += '\n'; break;
      case 'r': out += '\r'; break;
      case '\\': out += '\\'; break;
      default: return std::nullopt;
    }
  }
  return out;
}

std::string escaped(std::string_view name) {
  std::string out;
  for (const char c : name) out += c == '\n' ? "\\n" : c == '\r' ? "\\r" : c == '\\' ? "\\\\" : std::string(1, c);
  return out;
}

/// A file in the manifest's folder or below it, by a name without detours.
bool is_below(std::string_view name) {
  if (name.find('\0') != std::string_view::npos) return false;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('/', begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    if (part.empty() || part == "." || part == "..") return false;
    begin = end + 1;
  }
  return true;
}

/// As sha256sum writes it ("0123...  name"), or with --tag ("SHA256 (name) = 0123...").
bool split_line(std::string_view line, std::string_view& name, std::string_view& digest) {
  constexpr std::string_view kTag = "SHA256 (", kBehind = ") = ";
  if (line.starts_with(kTag) && line.size() > kTag.size() + kBehind.size() + kDigits) {
    const size_t end = line.size() - kDigits - kBehind.size();
    name = line.substr(kTag.size(), end - kTag.size());
    digest = line.substr(end + kBehind.size());
    return line.substr(end, kBehind.size()) == kBehind;
  }
  if (line.size() < kDigits + 3 || line[kDigits] != ' ' || (line[kDigits + 1] != ' ' && line[kDigits + 1] != '*'))
    return false;
  name = line.substr(kDigits + 2);
  digest = line.substr(0, kDigits);
  return true;
}

/// Name and digest; nothing where the line is none.
std::optional<std::pair<std::string, std::string>> parse_line(std::string_view line) {
  const bool has_escapes = line.starts_with('\\');
  if (has_escapes) line.remove_prefix(1);
  std::string_view name, written;
  if (!split_line(line, name, written)) return std::nullopt;
  std::string digest(written);
  for (char& c : digest) {
    if (c >= 'A' && c <= 'F') c = static_cast<char>(c - 'A' + 'a');
    if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'))) return std::nullopt;
  }
  if (name.starts_with("./")) name.remove_prefix(2);
  if (!has_escapes) return std::pair(std::string(name), std::move(digest));
  auto plain = unescaped(name);
  if (!plain) return std::nullopt;
  return std::pair(std::move(*plain), std::move(digest));
}

}  // namespace

fs::path manifest_of(const fs::path& path) {
  constexpr size_t kMostName = 255;  // bytes, of Linux's file systems
  if (base::leads_to_directory(path)) return path / "SHA256SUMS";
  fs::path beside(path.native() + ".sha256");
  if (beside.filename().native().size() > kMostName) {
    base::fail(Code::kInvalidArgument,
               "{}: behind this name there is no room for .sha256; give the directory, whose manifest is SHA256SUMS",
               path.string());
  }
  return beside;
}

Digests parse_manifest(std::string_view text, std::string_view where) {
  Digests digests;
  for (int number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty() || line.starts_with('#')) continue;
    auto parsed = parse_line(line);
    if (!parsed)
      base::fail(Code::kCorrupt,
                 "{}: line {} is not a SHA-256 of 64 digits, two spaces and a name, nor 'SHA256 (name) = digits'",
                 where, number);
    if (!is_below(parsed->first))
      base::fail(Code::kCorrupt, "{}: line {}: '{}' is no name of a file beside it, or below", where, number,
                 parsed->first);
    if (!digests.emplace(std::move(*parsed)).second)
      base::fail(Code::kCorrupt, "{}: line {}: this file is there twice", where, number);
  }
  return digests;
}

Digests read_manifest(const fs::path& manifest) {
  const base::File file = base::File::open(manifest);
  const int64_t size = file.size();
  if (size > kMostManifestBytes)
    base::fail(Code::kCorrupt, "{}: {} bytes are too many for a manifest; {} are the most", manifest.string(), size,
               kMostManifestBytes);
  std::string text(static_cast<size_t>(size), '\0');
  file.read(std::as_writable_bytes(std::span(text)), 0);
  return parse_manifest(text, manifest.string());
}

std::string to_text(const Digests& digests) {
  std::string text;
  for (const auto& [name, digest] : digests) {
    const std::string written = escaped(name);
    text += fmt::format("{}{}  {}\n", written == name ? "" : "\\", digest, written);
  }
  return text;
}

void write_manifest(const fs::path& manifest, const Digests& digests) {
  write_text(manifest, to_text(digests));
}

}  // namespace shardow::cli
