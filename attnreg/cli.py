"""The command line: what is here, what would run, who can do what, does it keep its claims."""

from __future__ import annotations

import json
import math
import platform
from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import matrices, registry
from .attention import explain_spec
from .call import AttentionCall, Pages
from .packing import Padding
from .spec import AttentionSpec
from .version import __version__

app = typer.Typer(
    name="attnreg", help="One attention call, run by the best kernel that can give exactly its meaning.", no_args_is_help=True
)
console = Console()

_LIBRARIES = ("torch", "flash-attn", "flash-attn-3", "flash-attn-4", "xformers", "mslk", "triton", "transformers", "pluggy", "hypothesis")
_BESIDE = (
    "Kernel libraries that meet: flash-attn and flash-attn-4 share the package folder flash_attn, so that 4 has to be installed last; "
    "xformers pins a torch, and leaves yours only with pip install --no-deps xformers."
)


def _tell_version(asked: bool) -> None:
    if asked:
        console.print(f"attnreg {__version__}")
        raise typer.Exit()


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_tell_version, help="Which attnreg.")] = False,
) -> None:
    """One attention call, run by the best kernel that can give exactly its meaning."""


@app.command()
def doctor() -> None:
    """Versions, device, and every backend: ready, or missing because ... and what to do. Exits with 1 when a plugin is broken."""
    versions = Table("library", "version", box=None, pad_edge=False)
    versions.add_row("python", platform.python_version())
    for name in _LIBRARIES:
        versions.add_row(name, _version(name))
    console.print(versions)
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        console.print(f"device  {torch.cuda.get_device_name()}, compute capability {major}.{minor}, CUDA {torch.version.cuda}\n")
    else:
        console.print("device  CPU only: this torch sees no CUDA device\n")

    console.print("[bold]Backends, in automatic order[/bold]")
    table = Table("backend", "from", "state", box=None, pad_edge=False)
    for name, backend in registry.backends().items():
        missing = backend.reason_missing
        here = ("cuda" in backend.claims.devices and torch.cuda.is_available()) or "cpu" in backend.claims.devices
        state = (
            "[green]ready[/green]" if not missing and here else "no device of its own here: " + ", ".join(sorted(backend.claims.devices))
        )
        if missing:
            state = f"[yellow]missing[/yellow]  {escape(missing.asked)}: {escape(missing.supported)}" + (
                f"\n{escape(missing.remedy)}" * bool(missing.remedy)
            )
        table.add_row(name, registry.origin(name), state)
    console.print(table)
    slow = {name: seconds for name, seconds in registry.import_seconds().items() if seconds > 1.0}
    for name, seconds in slow.items():
        console.print(f"[yellow]slow[/yellow]  {name} took {seconds:.1f} s to import; a plugin imports its library inside run and missing")
    failures = registry.failures()
    for failure in failures:
        console.print(f"[red]broken plugin[/red]  {escape(str(failure))}", soft_wrap=True)
    console.print("\n" + _BESIDE)
    raise typer.Exit(1 if failures else 0)


@app.command()
def explain(
    query: Annotated[str, typer.Option(help="B,Sq,Hq,D", metavar="B,SQ,HQ,D")],
    keys: Annotated[int | None, typer.Option(help="Key slots Sk; by default Sq.", min=0)] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key heads; by default Hq.", min=1)] = None,
    value_dim: Annotated[int | None, typer.Option(help="Dv; by default D.", min=1)] = None,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, float32 or float64")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda; it need not be here.")] = "cpu",
    capability: Annotated[str, typer.Option(help="Compute capability for --device cuda.")] = "9.0",
    causal: Annotated[bool, typer.Option("--causal")] = False,
    window: Annotated[
        str | None, typer.Option(help="left,right slots besides the query's own; 'none' for unlimited.", metavar="L,R")
    ] = None,
    key_mask: Annotated[str | None, typer.Option(help="Key padding of a form: left, right or any.")] = None,
    query_mask: Annotated[str | None, typer.Option(help="Query padding of a form: left, right or any.")] = None,
    mask: Annotated[bool, typer.Option("--mask", help="A bool mask (B, 1, Sq, Sk).")] = False,
    bias: Annotated[bool, typer.Option("--bias", help="A bias (1, Hq, Sq, Sk).")] = False,
    key_lengths: Annotated[bool, typer.Option("--key-lengths")] = False,
    query_lengths: Annotated[bool, typer.Option("--query-lengths")] = False,
    key_starts: Annotated[bool, typer.Option("--key-starts")] = False,
    packed: Annotated[int | None, typer.Option(help="This many packed segments; B is 1.", min=0)] = None,
    page_size: Annotated[int | None, typer.Option(help="Keys in pages of this many slots.", min=1)] = None,
    alibi: Annotated[bool, typer.Option("--alibi")] = False,
    softcap: Annotated[float | None, typer.Option()] = None,
    sinks: Annotated[bool, typer.Option("--sinks")] = False,
    scale: Annotated[float | None, typer.Option()] = None,
    dropout: Annotated[float, typer.Option()] = 0.0,
    lse: Annotated[bool, typer.Option("--lse")] = False,
    training: Annotated[bool, typer.Option("--training", help="Gradients of query, key, value and of every learned term.")] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic")] = False,
    compiling: Annotated[bool, typer.Option("--compile", help="Inside torch.compile.")] = False,
    capturing: Annotated[bool, typer.Option("--capture", help="While a CUDA graph is captured.")] = False,
    backend: Annotated[list[str] | None, typer.Option(help="A name; again for an ordered list.")] = None,
    layer: Annotated[str | None, typer.Option()] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """What would run a call, and why nothing else would. Exits with 1 when nothing can."""
    batch, length, heads, dim = _numbers("--query", query, 4)
    known = sorted({each for backend in registry.backends().values() for each in backend.claims.devices})
    if device not in known:
        raise typer.BadParameter(f"--device: {' or '.join(known)}, got {device!r}")
    slots = length if keys is None else keys

    def tensor(*shape: int, kind: torch.dtype | None = None, learned: bool = False) -> torch.Tensor:
        made = torch.empty(shape, dtype=kind or _dtype(dtype), device="meta")
        return made.requires_grad_() if learned and training else made

    def padding(option: str, form: str | None, size: int) -> Padding | None:
        if form not in (None, "left", "right", "any"):
            raise typer.BadParameter(f"{option}: left, right or any, got {form!r}")
        counts = tensor(batch, kind=torch.int32)
        return None if form is None else Padding(tensor(batch, size, kind=torch.bool), form, counts)

    def lengths(asked: bool) -> torch.Tensor | None:
        return tensor(batch, kind=torch.int32) if asked else None

    shape = (batch, slots, kv_heads or heads)
    key, value = tensor(*shape, dim, learned=True), tensor(*shape, value_dim or dim, learned=True)
    pages = None
    if page_size is not None:
        count = -(-slots // page_size)
        pages = Pages(
            tensor(count, page_size, *shape[2:], dim),
            tensor(count, page_size, *shape[2:], value_dim or dim),
            tensor(batch, count, kind=torch.int32),
        )
    starts = None if packed is None else tensor(packed + 1, kind=torch.int32)
    try:
        call = AttentionCall(
            tensor(batch, length, heads, dim, learned=True),
            None if pages else key,
            None if pages else value,
            causal=causal,
            window=None if window is None else _window(window),
            query_mask=padding("--query-mask", query_mask, length),
            key_mask=padding("--key-mask", key_mask, slots),
            mask=tensor(batch, 1, length, slots, kind=torch.bool) if mask else None,
            bias=tensor(1, heads, length, slots, learned=True) if bias else None,
            key_lengths=lengths(key_lengths or pages is not None),
            query_lengths=lengths(query_lengths),
            key_starts=lengths(key_starts),
            cu_seqlens=None if starts is None else (starts, starts if slots == length else starts.clone()),
            alibi_slopes=tensor(heads, kind=torch.float32, learned=True) if alibi else None,
            softcap=softcap,
            sinks=tensor(heads, kind=torch.float32, learned=True) if sinks else None,
            scale=scale,
            dropout_p=dropout,
            return_lse=lse,
            deterministic=deterministic,
            pages=pages,
        )
        level = _capability(capability)
        spec: AttentionSpec = call.spec._replace(
            device=device, capability=level if device == "cuda" else None, compiling=compiling, capturing=capturing
        )
        named = None if not backend else backend[0] if len(backend) == 1 else backend
        selection = explain_spec(spec, named, layer)
    except (ValueError, TypeError, LookupError) as error:
        raise typer.BadParameter(str(error.args[0])) from error
    if as_json:
        print(json.dumps(selection.as_dict(), indent=1))
    else:
        console.print(escape(str(selection)), highlight=False, soft_wrap=True)
    raise typer.Exit(0 if selection.chosen else 1)


@app.command()
def matrix(
    markdown: Annotated[bool, typer.Option("--markdown", help="As a table for a README.")] = False,
    report: Annotated[
        Path | None, typer.Option("--from", help="Show the certificate that `attnreg check --report` wrote.", exists=True, dir_okay=False)
    ] = None,
) -> None:
    """Features by backends, from the claims; or a certificate."""
    if report:
        try:
            written = json.loads(report.read_text(encoding="utf-8"))
            (head, rows), headline = matrices.certificate(written), matrices.headline(written)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise typer.BadParameter(f"--from: a certificate that attnreg check --report wrote; {report} is none ({error!r})") from error
        print(headline + "\n")
    else:
        head, rows = matrices.claims(registry.backends().values())
    if markdown:
        print(matrices.markdown(head, rows))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, word in enumerate(head):
        table.add_column(word, no_wrap=number == 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="The backend's name.")],
    device: Annotated[str, typer.Option()] = "cuda" if torch.cuda.is_available() else "cpu",
    dtype: Annotated[list[str] | None, typer.Option(help="Again for several; by default all that are claimed.")] = None,
    profile: Annotated[str, typer.Option(help="ci, thorough, large, or jit for few kinds of calls")] = "ci",
    examples: Annotated[int | None, typer.Option(help="Calls a check at most, where each takes long.", min=1)] = None,
    sizes: Annotated[str | None, typer.Option(help="small, mixed, few or compiled (for backends that compile for each), or large")] = None,
    kinds: Annotated[
        int | None, typer.Option(min=1, help="For kernels that are compiled: kinds of calls for each check; 1 makes the fewest.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes that share the calls out; for an installed plugin.", min=1)] = 1,
    seconds: Annotated[float | None, typer.Option(help="Begin no call after so many; what was cut short says so.", min=1)] = None,
    report: Annotated[Path | None, typer.Option(help="Write the certificate there, as JSON.")] = None,
) -> None:
    """The conformance suite on one backend: equal to the reference in all that it claims, refusing all that it does not."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    try:
        from .conformance import PROFILES, run_checks
        from .conformance.strategies import SIZES
    except ModuleNotFoundError as error:
        raise _lacks(error, "conformance") from error
    if profile not in PROFILES:
        raise typer.BadParameter(f"--profile: {' or '.join(PROFILES)}, got {profile!r}")
    if report and (report.is_dir() or not report.absolute().parent.is_dir()):
        raise typer.BadParameter(f"--report: a file in a folder that is there, got {str(report)!r}")
    if sizes not in (None, *SIZES):
        raise typer.BadParameter(f"--sizes: {' or '.join(SIZES)}, got {sizes!r}")
    amount = PROFILES[profile]
    amount = amount._replace(sizes=sizes or amount.sizes, kinds=kinds or amount.kinds)
    if examples is not None:
        amount = amount._replace(examples=min(amount.examples, examples), per_feature=min(amount.per_feature, examples))
    failed = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    try:
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(name, total=None)

            def progress(done, total, outcome):
                bar.update(task, completed=done, total=total, description=outcome.name[:44])
                if outcome.result == "failed":
                    failed.append(outcome)

            dtypes = [_dtype(d) for d in dtype] if dtype else None
            result = run_checks(name, device=device, dtypes=dtypes, profile=amount, progress=progress, jobs=jobs, seconds=seconds)
    except (LookupError, ValueError) as error:
        raise typer.BadParameter(str(error.args[0])) from error
    if report:
        result.write(str(report))
    for outcome in failed:
        console.print(f"[red]failed[/red]  {escape(outcome.name)}\n{escape(outcome.text)}\n", soft_wrap=True)
    words = ("passed", "failed", "skipped", "excepted")
    counts = {word: sum(outcome.result == word for outcome in result.outcomes) for word in words}
    if not counts["excepted"]:
        del counts["excepted"]
    cases = sum(outcome.cases for outcome in result.outcomes)
    for outcome in result.outcomes:
        if outcome.text and outcome.result != "failed":
            console.print(f"{outcome.result}  {escape(outcome.name)}: {escape(outcome.text)}", soft_wrap=True)
    console.print(f"{name} on {device}: {', '.join(f'{n} checks {word}' for word, n in counts.items())}; {cases} calls")
    drawn = result.tally.drawn()
    dims = ", ".join(
        f"{words} {', '.join(map(str, drawn[what]))}" for words, what in (("head dims", "head_dim"), ("value dims", "value_dim"))
    )
    console.print(f"drawn: {drawn['kinds']} kinds of calls, {dims}, {', '.join(drawn['dtype'])}", soft_wrap=True)
    raise typer.Exit(0 if result.passed else 1)


@app.command("new-backend")
def new_backend(
    name: Annotated[str, typer.Argument(help='As users will write it: backend="NAME".')],
    folder: Annotated[Path, typer.Option(help="Where the package's folder goes.")] = Path(),
) -> None:
    """Writes a package with a backend that passes the conformance suite at once: the place to start from."""
    from .scaffold import write_package

    try:
        written = write_package(name, folder)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    for path in written:
        console.print(str(path), highlight=False, soft_wrap=True)
    root = written[0].parent
    console.print(f"\nNext: pip install -e '{root}\\[test]' && pytest {root}", highlight=False, soft_wrap=True)


@app.command()
def demo() -> None:
    """A real model, all-MiniLM-L6-v2, on sentences of very different lengths: its own attention beside attnreg's."""
    from .demo import run

    try:
        run(console)
    except ModuleNotFoundError as error:
        raise _lacks(error, "demo") from error


def _lacks(error: ModuleNotFoundError, extra: str) -> typer.Exit:
    console.print(f"[red]{error.name} is missing[/red]: pip install 'attnreg\\[{extra}]'")
    return typer.Exit(1)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "-"


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise typer.BadParameter(f"--dtype: float16, bfloat16, float32 or float64, got {name!r}")
    return found


def _numbers(option: str, text: str, count: int) -> list[int]:
    parts = text.split(",")
    if len(parts) != count or not all(part.strip().isdecimal() for part in parts):
        raise typer.BadParameter(f"{option}: {count} whole numbers with commas between, got {text!r}")
    numbers = [int(part) for part in parts]
    if math.prod(numbers) >= 2**48:  # the memory of no machine; torch can't count the bytes of much larger tensors
        raise typer.BadParameter(f"{option}: sizes of a tensor that could be somewhere, got {text!r}")
    return numbers


def _capability(text: str) -> tuple[int, ...]:
    parts = text.split(".")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"--capability: two whole numbers with a point between, as in 9.0, got {text!r}")
    return tuple(int(part) for part in parts)


def _window(text: str) -> tuple[int | None, ...]:
    sides = [part.strip().lower() for part in text.split(",")]
    if len(sides) != 2 or not all(side == "none" or side.isdecimal() for side in sides):
        raise typer.BadParameter(f"--window: left,right, each a whole number or 'none', got {text!r}")
    return tuple(None if side == "none" else int(side) for side in sides)
