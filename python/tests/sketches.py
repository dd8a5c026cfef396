"""The sketches of public headers: what is indented in their comments and has statements, and what docs/cpp_reference.md
has of each.
"""

from __future__ import annotations

import re
from pathlib import Path

REFERENCE = Path(__file__).parents[2] / "docs" / "cpp_reference.md"

#: What a sketch may use without saying where it comes from.
GIVEN = """\
[[maybe_unused]] static void sketch_{number}(
    [[maybe_unused]] std::vector<shardow::TensorView> views, [[maybe_unused]] shardow::Group& group,
    [[maybe_unused]] shardow::Group& background, [[maybe_unused]] shardow::Average& ema,
    [[maybe_unused]] const std::filesystem::path& path, [[maybe_unused]] const shardow::SaveOptions& options,
    [[maybe_unused]] int argc, [[maybe_unused]] char** argv{more}) {{
  {{
{code}
  }}
}}
"""

#: What is the program's own.
PROGRAM = "template <class... What>\nvoid evaluate(const What&...) {}\n"


def blocks_of(text: str) -> list[str]:
    """Each stretch of comment lines that are indented by three spaces, where one of them ends as a statement does."""
    stretches = re.findall(r"(?:^ *///?   .*\n)+", text, re.MULTILINE)
    codes = [re.sub(r"^ *///?   ", "", stretch, flags=re.MULTILINE) for stretch in stretches]
    return [code for code in codes if re.search(r"[;{](?:\s*//.*)?$", code, re.MULTILINE)]


def shown_of(header: str) -> list[str]:
    """The blocks of C++ in a header's part of the reference."""
    (part,) = re.findall(rf"^## {re.escape(header)}\n(.*?)(?=^## |\Z)", REFERENCE.read_text(), re.MULTILINE | re.DOTALL)
    return re.findall(r"^```cpp\n(.*?)^```", part, re.MULTILINE | re.DOTALL)


def program_of(*headers: Path, more: str = "") -> str:
    """A source of all sketches of installed headers, each a function's body; ``more`` declares what only these are
    given.
    """
    codes = [code for header in headers for code in blocks_of(header.read_text()) + shown_of(header.name)]
    names = ("average.h", "ema_file.h", *(header.name for header in headers))
    needed = ["<future>", "<iostream>", *(f"<shardow/{name}>" for name in names)]
    bodies = [GIVEN.format(number=number, more=more, code=code) for number, code in enumerate(codes)]
    return "".join(f"#include {one}\n" for one in needed) + "using namespace shardow;\n" + PROGRAM + "".join(bodies)
