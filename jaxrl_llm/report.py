"""`python -m jaxrl_llm.report RUN …`: one or more runs as a page of HTML."""

import argparse
import contextlib
import sys
from collections.abc import Sequence

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.help import complete_words


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.report",
        description="Write runs as one page of HTML: what they learned, what looks wrong, their "
        "answers, and their time. It is opened from disk and needs no network.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run of train or sft")
    parser.add_argument(
        "--out", metavar="FILE.html", help="file to write; default report.html in the first folder"
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="show the page at an address of this machine, and follow runs that are training",
    )
    parser.add_argument(
        "--health", action="store_true", help="print what looks wrong in each run, and no more"
    )
    parser.add_argument("--port", type=int, default=8321, help="of --serve; 0: one that is free")
    complete_words(parser)
    options = parser.parse_args(arguments)
    if sum(map(bool, (options.out, options.serve, options.health))) > 1:
        parser.error("--out, --serve and --health exclude each other: name one of them")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _parse(arguments)
    try:
        if options.serve:
            follow_runs(options.runs, options.port)
        elif options.health:
            from jaxrl_llm.reporting.health import check_run, health_text
            from jaxrl_llm.training.run_files import read_run

            checked = [f"{run}\n{health_text(check_run(read_run(run)))}\n" for run in options.runs]
            sys.stdout.write("\n".join(checked))
        else:
            from jaxrl_llm.reporting.page import write_report

            path = write_report(options.runs, options.out)
            sys.stdout.write(f"wrote {path}\n")
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def follow_runs(runs: Sequence[str], port: int) -> None:
    """Serve the page until Ctrl-C, and print its address.

    Raises:
        ConfigError: there is no run in a folder, or the port is taken.
    """
    from jaxrl_llm.reporting.page import open_server

    with open_server(runs, port) as server, contextlib.suppress(KeyboardInterrupt):
        address = f"http://127.0.0.1:{server.server_address[1]}"
        sys.stdout.write(f"the page is at {address} until Ctrl-C\n")
        sys.stdout.flush()
        server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
