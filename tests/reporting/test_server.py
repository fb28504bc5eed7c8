import http.client
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from filelock import FileLock

from jaxrl_llm.reporting.page import open_server
from tests.refusals import refuses
from tests.reporting.browsing import plot_data, show, until
from tests.reporting.folders import kept_answer, step_line, write_lines, write_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def serve():
    servers = []

    def opened(*runs):
        server = open_server(runs, 0)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}/"

    yield opened
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_page_follows_a_run_that_grows(serve, open_address, tmp_path):
    folder = write_run(tmp_path / "run", [step_line(n) for n in range(1, 4)], "steps=40")
    page = open_address(serve(folder))
    page.evaluate("page.pollMs = 100")
    with FileLock(folder / ".lock"):
        show(page, "curves")
        page.fill("#curves input[type=search]", "actor/")
        until(page, "document.querySelectorAll('#curves .plot').length === 2")
        assert len(plot_data(page, "actor/grad_norm")[0]["x"]) == 3
        write_lines(folder, [step_line(n) for n in range(4, 9)])
        until(
            page,
            "document.querySelector('[data-family=\"actor/grad_norm\"]').data[0].x.length === 8",
        )
        assert page.input_value("#curves input[type=search]") == "actor/"
        show(page, "answers")
        page.wait_for_selector("text=No answers are kept")
        other = write_run(tmp_path / "other", [], answers={8: [kept_answer("4")] * 3})
        (other / "rollouts").rename(folder / "rollouts")
        until(page, "document.querySelectorAll('table.answers tbody tr').length === 3")
        page.locator("table.answers tbody tr").first.click()
        write_lines(folder, [step_line(9)])
        until(page, "page.data.runs[0].status.step === 9")
        assert page.locator("dialog[open]").count() == 1
        page.keyboard.press("Escape")
        show(page, "overview")
        assert "training, step 9 of 40" in page.inner_text("#overview")
    page.wait_for_selector("text=stopped at step 9 of 40")
    assert page.inner_text("#made").startswith("follows the run")
    page.evaluate("() => { window.ask = fetch; window.fetch = () => Promise.reject('!'); }")
    page.wait_for_selector("text=no answer from the server")
    page.evaluate("() => { window.fetch = window.ask; }")
    page.wait_for_selector("#made:has-text('follows the run')")


def ask(address, path, host=None):
    connection = http.client.HTTPConnection(address.split("/")[2])
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status, answer.getheader("Content-Type")


def test_what_the_server_answers_and_to_whom(serve, tmp_path):
    address = serve(write_run(tmp_path / "run", [step_line(1)]))
    assert address.startswith("http://127.0.0.1:")
    assert ask(address, "/") == (200, "text/html; charset=utf-8")
    assert ask(address, "/data") == (200, "application/json; charset=utf-8")
    assert ask(address, "/docs/metrics.md") == (200, "text/plain; charset=utf-8")
    assert ask(address, "/", "localhost:9000") == (200, "text/html; charset=utf-8"), "forwarded"
    assert ask(address, "/", "evil.example:80")[0] == 403
    for path in ("/config.yaml", "/docs/../README.md", "/docs/..%2FREADME.md", "/docs/"):
        assert ask(address, path)[0] == 404, path


def test_a_folder_that_is_gone_is_said_and_may_come_back(serve, tmp_path):
    folder = write_run(tmp_path / "运行", [step_line(1)])
    address = serve(folder)
    folder.rename(tmp_path / "away")
    assert ask(address, "/data")[0] == 503
    (tmp_path / "away").rename(folder)
    assert ask(address, "/data")[0] == 200


def test_a_port_that_is_taken_is_refused(serve, tmp_path):
    folder = write_run(tmp_path / "run", [])
    port = int(serve(folder).rstrip("/").rpartition(":")[2])
    with refuses("--port"):
        open_server([folder], port)


def test_the_program_prints_its_address_and_ends_at_ctrl_c(tmp_path):
    folder = write_run(tmp_path / "run", [step_line(1)])
    command = [sys.executable, "-m", "jaxrl_llm.report", str(folder), "--serve", "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with process:
        line = process.stdout.readline()
        address = line.split()[4]
        with urllib.request.urlopen(address) as answer:
            assert answer.status == 200
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) == 0
    assert line == f"the page is at {address} until Ctrl-C\n"
