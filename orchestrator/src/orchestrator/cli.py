"""The command line. Only what `--help` needs is imported here; each command brings its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.commands.errors import UsageError

_EXAMPLES = """\b
Examples:
  fathom generate "def fibonacci(n):" --max-tokens 64 --seed 1 --stats
  fathom generate "A point:" --json-schema schema.json --temperature 0
  fathom serve --port 8000
  fathom serve --cluster local --prefill 2 --decode 2
  fathom cluster status
  fathom init v41-mini models/mine --seed 7
  fathom eval --quick
  fathom train --smoke
  fathom simulate --seeds 20
  fathom figures
  fathom bench list
  fathom doctor
  fathom test packages/mla_fp4 -k topk
"""
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    help="DeepSeek-V4.1-Flash from open parts: kernels, engine, server.",
    epilog=_EXAMPLES,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Model = Annotated[str | None, typer.Option(help="folder of a checkpoint, or v41-mini or v41-nano")]
Threads = Annotated[int | None, typer.Option(min=1, help="threads of the kernels; default: all cores")]
Device = Annotated[str, typer.Option(help="cpu, or cuda for an NVIDIA GPU")]
Speculation = Annotated[
    str, typer.Option(help="drafts that a step verifies: scheduled by what they gain, a number, or off")
]
PrefixCache = Annotated[
    str | None,
    typer.Option(
        help="prompts share the cache of a common beginning: off, bounded, exact or canonical; "
        "default: exact (canonical with --cache-folder, bounded with --no-reproducible)"
    ),
]
Reproducible = Annotated[
    bool, typer.Option("--reproducible/--no-reproducible", help="products in a fixed tile: no bit depends on the batch")
]


@app.command(
    epilog='\b\nExamples:\n  fathom generate "Hello" --temperature 0\n  cat notes.txt | fathom generate - --stop END'
)
def generate(
    prompt: Annotated[str, typer.Argument(help="text to continue; - reads standard input")],
    model: Model = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="new tokens at most")] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="0 takes the likeliest token; default: what the model asks for, else 1"),
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="smallest set of tokens with this probability, in (0, 1]; default likewise")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="the k most likely tokens; 0 takes all")] = None,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same text")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; may be repeated")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="picture before the text; may be repeated")] = None,
    json_schema: Annotated[
        str | None, typer.Option(help="JSON schema that the text obeys: a file or the schema")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="regular expression that the whole text matches")] = None,
    lark: Annotated[str | None, typer.Option(help="Lark grammar of the text: a file or the grammar")] = None,
    device: Device = "cpu",
    reproducible: Reproducible = True,
    speculation: Speculation = "scheduled",
    threads: Threads = None,
    ep: Annotated[int, typer.Option(min=1, help="processes that share the experts; with --device cuda a GPU each")] = 1,
    ep_slots: Annotated[int | None, typer.Option(min=1, help="experts of a layer that each of them holds")] = None,
    ep_plan: Annotated[
        str, typer.Option(help="whose rows experts are placed anew by while they run: off, prefill, decode or all")
    ] = "off",
    ep_domain: Annotated[int, typer.Option(min=0, help="processes in a row with fast links; 0 where all have")] = 0,
    stats: Annotated[bool, typer.Option("--stats", help="print speed to standard error")] = False,
) -> None:
    """Continue a text; it is printed as it comes."""
    from orchestrator.commands.generate import GenerateOptions
    from orchestrator.commands.generate import generate as run

    values = {name: value for name, value in locals().items() if name in GenerateOptions.__dataclass_fields__}
    raise typer.Exit(run(GenerateOptions(**{**values, "stop": tuple(stop or ()), "image": tuple(image or ())})))


@app.command(
    epilog="\b\nExamples:\n  fathom serve\n  fathom serve --host 0.0.0.0 --api-key-file keys.txt --alias claude-local\n"
    "  fathom serve --cluster local --prefill 2 --decode 2 --encoder 1\n"
    "  fathom serve --cluster ray --cluster-address auto --decode 8 --store directory:/mnt/cache\n"
    "  fathom serve --cluster local --decode 2 --print-config > service.json\n"
    "  fathom serve --cluster-config service.json"
)
def serve(
    context: typer.Context,
    model: Model = None,
    name: Annotated[str | None, typer.Option(help="model name in the API; default: the folder's name")] = None,
    alias: Annotated[list[str] | None, typer.Option(help="another accepted model name; may be repeated")] = None,
    host: Annotated[str, typer.Option(help="address; beyond loopback only with an API key")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8000,
    api_key_file: Annotated[Path | None, typer.Option(help="keys, one a line; also FATHOM_API_KEYS=a,b")] = None,
    max_context: Annotated[int | None, typer.Option(min=2, help="tokens of prompt and output")] = None,
    max_requests: Annotated[int, typer.Option(min=1, help="requests in work or waiting; one more gets 429")] = 256,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="requests in one batch")] = 16,
    num_blocks: Annotated[int, typer.Option(min=1, help="cache blocks of 128 tokens")] = 512,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="largest request body")] = 8.0,
    default_max_tokens: Annotated[int | None, typer.Option(min=1, help="for requests that give no limit")] = None,
    requests_per_minute: Annotated[float, typer.Option(min=0, help="for each key; 0: no limit")] = 0.0,
    tokens_per_minute: Annotated[float, typer.Option(min=0, help="for each key; 0: no limit")] = 0.0,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="reason unless a request says not to")
    ] = None,
    device: Device = "cpu",
    reproducible: Reproducible = True,
    speculation: Speculation = "scheduled",
    prefix_cache: PrefixCache = None,
    cache_folder: Annotated[Path | None, typer.Option(help="keep cache blocks there, beyond the server's life")] = None,
    cache_gb: Annotated[float, typer.Option(min=0.1, help="size of that folder at most, in GiB")] = 16.0,
    cache_key_gb: Annotated[float | None, typer.Option(min=0.01, help="of it at most for each API key, in GiB")] = None,
    window_listen: Annotated[str | None, typer.Option(help="HOST:PORT where other servers ask for windows")] = None,
    window_peer: Annotated[list[str] | None, typer.Option(help="HOST:PORT of another server; may be repeated")] = None,
    max_images: Annotated[int, typer.Option(min=1, help="images in one request")] = 64,
    max_image_mb: Annotated[float, typer.Option(min=0.001, help="largest encoded image, in MiB")] = 32.0,
    max_image_mpixels: Annotated[
        float, typer.Option(min=0.001, max=170, help="largest decoded image, in 2^20 pixels")
    ] = 64.0,
    image_urls: Annotated[bool, typer.Option("--image-urls/--no-image-urls", help="fetch images given by URL")] = True,
    image_network: Annotated[
        list[str] | None,
        typer.Option(help="addresses that image URLs may lead to beside public ones, as 10.1.0.0/16; may be repeated"),
    ] = None,
    image_cache_gb: Annotated[float, typer.Option(min=0.001, help="memory for embeddings of images, in GiB")] = 1.0,
    threads: Threads = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error")] = "info",
    cluster: Annotated[
        str | None, typer.Option(help="run the roles as processes: local (this machine) or ray (a Ray cluster)")
    ] = None,
    prefill: Annotated[int | None, typer.Option(min=1, help="with --cluster: prefill workers; default 1")] = None,
    decode: Annotated[int | None, typer.Option(min=1, help="with --cluster: decode workers; default 1")] = None,
    encoder: Annotated[int | None, typer.Option(min=0, help="with --cluster: image encoders; default 0")] = None,
    prefill_ep: Annotated[
        int | None, typer.Option(min=1, help="with --cluster: ranks that share a prefill worker's experts")
    ] = None,
    decode_ep: Annotated[
        int | None, typer.Option(min=1, help="with --cluster: ranks that share a decode worker's experts")
    ] = None,
    cluster_config: Annotated[
        Path | None, typer.Option(help="TOML or JSON file of the service; options go before it")
    ] = None,
    cluster_address: Annotated[
        str | None, typer.Option(help="with --cluster ray: HOST:PORT or auto; default: Ray is started here")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="with --cluster: the workers' common cache store: none, embedded, directory or mooncake, "
            "with :FOLDER where it has one"
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="with --cluster: print the whole file as JSON and end")
    ] = False,
) -> None:
    """Serve the OpenAI and Anthropic protocols over HTTP, from one process or as a service of many."""
    from orchestrator.commands.cluster_options import ClusterOptions
    from orchestrator.commands.serve import ServeOptions

    given = {name: value for name, value in locals().items() if name not in ("context", "ClusterOptions")}
    values = {name: value for name, value in given.items() if name in ServeOptions.__dataclass_fields__}
    several = {"alias": tuple(alias or ()), "window_peer": tuple(window_peer or ())}
    several["image_network"] = tuple(image_network or ())
    options = ServeOptions(**(values | several))
    roles = ClusterOptions(**{name: given[name] for name in ClusterOptions.__dataclass_fields__})
    if roles.wanted:
        from orchestrator.commands.cluster import serve_cluster

        typed = [
            name for name in values if (source := context.get_parameter_source(name)) and "DEFAULT" not in source.name
        ]
        raise typer.Exit(serve_cluster(options, roles, frozenset(typed)))
    from orchestrator.commands.serve import serve as run

    roles.refuse()
    raise typer.Exit(run(options))


clusters = typer.Typer(
    help="Look at a running service, and have workers leave it.",
    epilog="\b\nExamples:\n  fathom cluster status\n  fathom cluster drain decode-1 --url http://10.0.0.1:8000",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(clusters, name="cluster")

Url = Annotated[str, typer.Option(help="of the service")]
KeyFile = Annotated[Path | None, typer.Option(help="the first of its keys is sent; also FATHOM_API_KEYS=a,b")]


@clusters.command(epilog="\b\nExamples:\n  fathom cluster status\n  fathom cluster status --json | jq .recoveries")
def status(
    url: Url = "http://127.0.0.1:8000",
    api_key_file: KeyFile = None,
    json: Annotated[bool, typer.Option("--json", help="all that is known, as JSON")] = False,
) -> None:
    """Show the processes of a service and how they are."""
    from orchestrator.commands.cluster_client import status as run

    raise typer.Exit(run(url, api_key_file, json))


@clusters.command(epilog="\b\nExamples:\n  fathom cluster drain decode-1")
def drain(
    worker: Annotated[str, typer.Argument(help="its name in `fathom cluster status`")],
    url: Url = "http://127.0.0.1:8000",
    api_key_file: KeyFile = None,
) -> None:
    """Have a worker finish or move its requests and leave; another takes over."""
    from orchestrator.commands.cluster_client import drain as run

    raise typer.Exit(run(worker, url, api_key_file))


@app.command()
def init(
    name: Annotated[str, typer.Argument(help="v41-mini (30M parameters) or v41-nano (3M)")],
    path: Annotated[Path | None, typer.Argument(help="folder; default: models/NAME")] = None,
    seed: Annotated[int, typer.Option(help="of the random weights")] = 0,
    force: Annotated[bool, typer.Option("--force", help="write over an existing model")] = False,
) -> None:
    """Write a random checkpoint with its tokenizer, in the official layout."""
    from orchestrator.commands.init import init as run

    raise typer.Exit(run(name, path, seed, force))


@app.command(name="add-vision")
def add_vision(
    path: Annotated[Path, typer.Argument(help="folder of a small model of text alone")],
    seed: Annotated[int, typer.Option(help="of the random weights")] = 0,
) -> None:
    """Give a small model an image encoder with random weights, so that images can be sent to it."""
    from orchestrator.commands.vision import add_vision as run

    raise typer.Exit(run(path, seed))


@app.command(
    name="eval",
    epilog="\b\nExamples:\n  fathom eval\n  fathom eval --only bits,replay --quick\n"
    "  fathom eval models/mine --json results.json",
)
def evaluate(
    model: Annotated[str | None, typer.Argument(help="folder of a checkpoint, or v41-mini or v41-nano")] = None,
    only: Annotated[
        str, typer.Option(help="sections, with commas: bits,replay,acceptance,calibration,recall,needle")
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="small samples: about a minute")] = False,
    thorough: Annotated[bool, typer.Option("--thorough", help="large samples")] = False,
    json: Annotated[Path | None, typer.Option(help="write all results to this file")] = None,
    plots: Annotated[Path | None, typer.Option(help="draw plots into this folder")] = None,
    page: Annotated[Path | None, typer.Option(help="rewrite the tables of this Markdown page")] = None,
    ledger: Annotated[bool, typer.Option("--ledger", help="add the results to bench/results/quality.jsonl")] = False,
    seed: Annotated[int, typer.Option(help="of samples and prompts")] = 0,
    threads: Threads = None,
) -> None:
    """Measure a model: bits per byte, replay, drafts, calibration, index recall, retrieval."""
    from orchestrator.commands.eval import EvalOptions
    from orchestrator.commands.eval import evaluate as run

    values = {name: value for name, value in locals().items() if name in EvalOptions.__dataclass_fields__}
    raise typer.Exit(run(EvalOptions(**values)))


@app.command(
    epilog="\b\nExamples:\n  fathom train --smoke\n  fathom train v41-mini --device cuda --minutes 9\n"
    "  fathom train v41-mini --stages data"
)
def train(
    name: Annotated[str, typer.Argument(help="v41-mini or v41-nano")] = "v41-mini",
    out: Annotated[Path | None, typer.Option(help="folder of the run; default: runs/NAME")] = None,
    data: Annotated[Path | None, typer.Option(help="dataset folder; made below the run folder if missing")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if there is one")] = None,
    steps: Annotated[int | None, typer.Option(help="of the backbone")] = None,
    drafter_steps: Annotated[int | None, typer.Option(help="of the draft stages")] = None,
    minutes: Annotated[float | None, typer.Option(help="stop in time and say how to go on")] = None,
    seed: Annotated[int, typer.Option(help="of start values and the order of the data")] = 0,
    stages: Annotated[
        str | None, typer.Option(help="some of data,backbone,drafter,export,calibrate,card; default: all")
    ] = None,
    export_to: Annotated[Path | None, typer.Option(help="model folder; default: model in the run folder")] = None,
    lr: Annotated[float | None, typer.Option(help="peak learning rate of the backbone")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="try the whole chain on v41-nano, in seconds")] = False,
) -> None:
    """Train a small model from text to a checkpoint; every stage goes on where it was stopped."""
    from orchestrator.commands.train import STAGES, TrainOptions
    from orchestrator.commands.train import train as run

    values = {name: value for name, value in locals().items() if name in TrainOptions.__dataclass_fields__}
    wanted = STAGES if stages is None else tuple(part.strip() for part in stages.split(","))
    raise typer.Exit(run(TrainOptions(**{**values, "stages": wanted})))


@app.command(
    epilog="\b\nExamples:\n  fathom simulate --seeds 200 --jobs 2\n  fathom simulate --seed 17 --minutes 10 --trace\n"
    "  fathom simulate --broken-variants --jobs 2\n  fathom simulate --matrix --json matrix.json"
)
def simulate(
    seed: Annotated[int | None, typer.Option(help="run this seed only")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="run seeds 1 to this one")] = 20,
    minutes: Annotated[float | None, typer.Option(help="virtual minutes with faults; default 10")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = 1,
    faults: Annotated[str, typer.Option(help="kinds that may happen, with commas; none for none; default all")] = "",
    trace: Annotated[bool, typer.Option("--trace", help="with --seed: print every message and fault")] = False,
    only: Annotated[str, typer.Option(help="with --trace: requests that it is about, with commas")] = "",
    shrink: Annotated[bool, typer.Option("--shrink", help="with --seed: leave out what it does not need")] = False,
    broken: Annotated[str | None, typer.Option("--break", help="leave this rule of the protocol out")] = None,
    broken_variants: Annotated[
        bool, typer.Option("--broken-variants", help="say how many seeds it takes to catch each broken variant")
    ] = False,
    matrix: Annotated[bool, typer.Option("--matrix", help="each kind of fault in each phase of a request")] = False,
    json: Annotated[Path | None, typer.Option(help="write the results to this file")] = None,
    list_faults: Annotated[bool, typer.Option("--list-faults", help="print the kinds of faults")] = False,
) -> None:
    """Simulate the service under faults; a seed gives the same run every time."""
    from orchestrator.commands.simulate import SimulateOptions
    from orchestrator.commands.simulate import simulate as run

    values = {name: value for name, value in locals().items() if name in SimulateOptions.__dataclass_fields__}
    raise typer.Exit(run(SimulateOptions(**values)))


@app.command(
    epilog="\b\nExamples:\n  fathom figures\n  fathom figures --only retention,capacity\n"
    "  fathom figures --only faults --matrix matrix.json\n  fathom figures --quick --out /tmp/f --page /tmp/f/page.md"
)
def figures(
    traces: Annotated[Path | None, typer.Option(help="folder of recorded traces; also FATHOM_TRACES")] = None,
    out: Annotated[Path | None, typer.Option(help="folder of figures.json and pictures; default: docs/service")] = None,
    page: Annotated[Path | None, typer.Option(help="page to write; default: docs/service_figures.md")] = None,
    matrix: Annotated[Path | None, typer.Option(help="JSON of `fathom simulate --matrix`, for the faults")] = None,
    only: Annotated[str, typer.Option(help="studies to run, with commas; others keep their results")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="small samples, in seconds, to try it out")] = False,
    redraw: Annotated[bool, typer.Option("--redraw", help="run nothing: pictures and page from figures.json")] = False,
    seed: Annotated[int, typer.Option(help="of the simulated traffic")] = 0,
) -> None:
    """Study capacity and policies on recorded traffic; published costs, no GPU. A quarter of an hour."""
    from orchestrator.commands.figures import FiguresOptions
    from orchestrator.commands.figures import figures as run

    values = {name: value for name, value in locals().items() if name in FiguresOptions.__dataclass_fields__}
    raise typer.Exit(run(FiguresOptions(**values)))


@app.command(context_settings=_PASS_ON, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Time kernels: `fathom bench --help` says how."""
    from orchestrator.commands.tools import bench as run

    raise typer.Exit(run(context.args))


@app.command(context_settings=_PASS_ON, add_help_option=False)
def test(context: typer.Context) -> None:
    """Run all tests; arguments go to pytest."""
    from orchestrator.commands.tools import test as run

    raise typer.Exit(run(context.args))


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="leave the trial run of the smallest model out")] = False,
) -> None:
    """Say what works on this machine."""
    from orchestrator.commands.doctor import doctor as run

    raise typer.Exit(run(quick))


def main() -> None:
    """Entry point. Errors that a user can act upon are printed in one piece, without a traceback."""
    try:
        app(prog_name="fathom")
    except UsageError as error:
        print(f"fathom: {error}", file=sys.stderr)
        sys.exit(error.code)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as error:
        # Bad input is a ValueError that names the argument; a missing or damaged file names itself.
        if os.environ.get("FATHOM_TRACEBACK"):
            raise
        print(f"fathom: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
