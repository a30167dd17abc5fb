"""The rules by which an elastic job forms its rounds, without processes: who is told what, and when."""

import json
import socket
import threading

import pytest
from deepspeed.errors import ConfigError
from deepspeed.launcher.membership import LAST_CALL_S, MEETING_TIMEOUT_S, Coordinator, Membership
from deepspeed.launcher.plan import NodeFailure


class Job:
    """A list of nodes, what each was told, and what the user was."""

    def __init__(self, least=1, most=4, restarts=1, expected=2):
        self.told, self.said = {}, []
        self.nodes = Membership(least, most, restarts, expected, self.tell, self.said.append)

    def tell(self, node, message):
        self.told.setdefault(node, []).append(message)

    def come(self, *nodes, ranks=2):
        for node in nodes:
            self.nodes.join(node, {"name": f"host {node}", "node_rank": node, "num_ranks": ranks})
            self.nodes.take(node, {"kind": "ready", "round": -1})

    def ready(self, number, *nodes):
        for node in nodes:
            self.nodes.take(node, {"kind": "ready", "round": number})

    def fail(self, number, node, words="boom", is_consequence=False, is_final=False, exit_code=3):
        failure = NodeFailure(node, 0, exit_code, is_consequence, words)._asdict()
        self.nodes.take(node, {"kind": "failed", "round": number, "failure": failure, "is_final": is_final})

    def news(self):
        """What each node was told since the last call, by its kind; a round by its place."""
        told, self.told = self.told, {}
        return {
            node: [f"round {m['round']}.{m['place']}" if m["kind"] == "round" else m["kind"] for m in messages]
            for node, messages in told.items()
        }


def test_the_first_round_waits_for_all_and_goes_by_node_rank():
    job = Job(expected=3)
    job.come(7, 5)
    assert job.news() == {}
    job.come(6)
    assert job.news() == {5: ["round 0.0"], 6: ["round 0.1"], 7: ["round 0.2"]}


def test_no_wait_is_longer_than_its_limit():
    nodes = Job(least=2, expected=3).nodes
    for nodes._since in (7989.049428832, 0.1, 1e6 + 1 / 3):  # the first one more 900 and less itself is more than 900
        assert nodes.wait_s(nodes._since) <= MEETING_TIMEOUT_S
        assert nodes.wait_s(nodes._since + MEETING_TIMEOUT_S) == 0.0


def test_the_first_round_goes_on_without_those_that_do_not_come():
    job = Job(least=2, expected=3)
    job.come(1)
    assert MEETING_TIMEOUT_S - 1 < job.nodes.wait_s(job.nodes._since) <= MEETING_TIMEOUT_S
    job.come(2)
    job.nodes.pass_time(job.nodes._since + LAST_CALL_S - 1)
    assert job.news() == {}
    job.nodes.pass_time(job.nodes._since + LAST_CALL_S)
    assert job.news() == {1: ["round 0.0"], 2: ["round 0.1"]}
    other = Job(expected=2)
    other.come(1)
    other.nodes.expect(1)  # the launcher saw the other host end
    assert other.news() == {1: ["round 0.0"]}


def test_too_few_nodes_end_the_job():
    job = Job(least=2, expected=2)
    job.come(1)
    job.nodes.pass_time(job.nodes._since + MEETING_TIMEOUT_S)
    assert job.news() == {1: ["end"]}
    assert "1 node came within 900 s, and --min_elastic_nodes is 2" in job.nodes.verdict.failure.words


def test_a_lost_node_costs_no_restart():
    job = Job(restarts=0, expected=3)
    job.come(1, 2, 3)
    job.news()
    job.fail(0, 2, is_consequence=True)  # its ranks noticed before the connection ended
    assert job.news() == {1: ["reform"], 3: ["reform"]}
    job.ready(0, 2)
    job.nodes.lose(1)
    assert job.said == ["host 1 is lost; the ranks of 2 other nodes form again"]
    assert job.news() == {}
    job.ready(0, 3)
    assert job.news() == {2: ["round 1.0"], 3: ["round 1.1"]}
    assert job.said[-1] == "4 ranks on 2 nodes go on"


def test_fewer_than_the_least_wait_for_another():
    job = Job(least=2)
    job.come(1, 2)
    job.nodes.lose(2)
    job.ready(0, 1)
    job.news()
    job.come(9)
    assert job.news() == {1: ["round 1.0"], 9: ["round 1.1"]}


def test_a_failed_rank_costs_one_restart_and_the_last_one_ends_the_job():
    job = Job(restarts=1)
    job.come(1, 2)
    job.news()
    job.fail(0, 1, is_consequence=True)
    job.fail(0, 2, "the cause")
    job.ready(0, 1, 2)
    assert job.news() == {2: ["reform", "round 1.1"], 1: ["round 1.0"]}
    assert job.said == ["4 ranks on 2 nodes go on; restart 1 of 1"]
    job.fail(1, 1, is_consequence=True)
    job.fail(1, 2, "the cause")
    assert job.news() == {2: ["reform"]}
    job.ready(1, 1, 2)
    assert [m["is_blamed"] for node in (1, 2) for m in job.told[node]] == [False, True]
    assert job.nodes.verdict.exit_code == 3
    assert job.nodes.verdict.failure.words == "the cause"


def test_an_error_that_comes_again_ends_the_job_at_once():
    job = Job(restarts=9)
    job.come(1, 2)
    job.fail(0, 1, "zero_optimization.stage: found 9", is_final=True)
    job.ready(0, 1, 2)
    assert job.nodes.verdict.failure.words.startswith("zero_optimization.stage")


def test_a_node_that_comes_is_taken_in_or_kept():
    job = Job(most=2, expected=1)
    job.come(1)
    job.news()
    job.come(2)
    assert job.news() == {1: ["reform"]}
    job.ready(0, 1)
    assert job.news() == {1: ["round 1.0"], 2: ["round 1.1"]}
    job.come(3)
    assert job.news() == {}
    assert job.said[-1] == "host 3 has come and is kept as a spare: --max_elastic_nodes is 2"
    job.nodes.lose(1)
    job.ready(1, 2)
    assert job.news() == {2: ["reform", "round 2.0"], 3: ["round 2.1"]}


def test_what_is_said_of_an_earlier_round_does_not_count():
    job = Job()
    job.come(1, 2)
    job.fail(0, 1)
    job.ready(0, 1, 2)
    job.news()
    job.ready(0, 1)  # answers a message of the round before
    job.fail(0, 2)
    job.nodes.take(1, {"kind": "done", "round": 0})
    assert job.news() == {}


def test_the_store_of_a_round_is_told_by_its_first_node():
    job = Job()
    job.come(1, 2)
    job.news()
    store = {"kind": "store", "round": 0, "address": ["10.0.0.1", 1234]}
    job.nodes.take(1, store)
    assert job.told == {2: [store]}


def test_all_have_to_be_done():
    job = Job()
    job.come(1, 2)
    job.nodes.take(1, {"kind": "done", "round": 0})
    assert job.nodes.verdict is None
    job.nodes.lose(2)  # what was done counts no more: its part was not
    job.ready(0, 1)
    job.nodes.take(1, {"kind": "done", "round": 1})
    assert job.nodes.verdict == (0, None)


def test_nothing_is_formed_again_once_the_job_is_told_to_end():
    job = Job()
    job.come(1, 2)
    job.nodes.stop()
    job.news()
    job.nodes.lose(1)
    job.ready(0, 2)
    assert job.news() == {}
    assert job.said == []


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--master_port {port}: cannot listen there \(Address already in use\)"):
            Coordinator(port, "job", 1, 1, 0, 1, print)


def test_a_node_of_another_job_is_refused_and_the_end_is_told():
    coordinator = Coordinator(0, "job", 1, 2, 0, 2, print)
    coordinator.start()
    port = coordinator.port
    hello = {"kind": "hello", "run_id": "job", "name": "here", "node_rank": 0, "num_ranks": 1}
    with socket.create_connection(("127.0.0.1", port)) as other, other.makefile("rw") as lines:
        lines.write(json.dumps({**hello, "run_id": "another"}) + "\n")
        lines.flush()
        assert json.loads(lines.readline()) == {"kind": "refused", "words": "the job here is job"}
        assert lines.readline() == ""
    for text in ("GET / HTTP/1.1", "[1]", "3", '{"kind": "hello"}'):
        with socket.create_connection(("127.0.0.1", port)) as other, other.makefile("rw") as lines:
            lines.write(f"{text}\n")
            lines.flush()
            assert lines.read() in ("", '{"kind": "refused", "words": "the job here is job"}\n')
    with socket.create_connection(("127.0.0.1", port)) as node, node.makefile("rw") as lines:
        lines.write(json.dumps(hello) + "\n" + json.dumps({"kind": "ready", "round": -1}) + "\n")
        lines.flush()
        coordinator.expect(1)
        assert json.loads(lines.readline()) == {"kind": "round", "round": 0, "place": 0, "counts": [1]}
        closing = threading.Thread(target=coordinator.finish)
        closing.start()
        assert json.loads(lines.readline())["kind"] == "end"
    closing.join()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_an_order_during_another_one_is_not_missed():
    coordinator = Coordinator(0, "job", 1, 2, 0, 2, print)
    done = threading.Event()
    coordinator._order(lambda: coordinator._order(done.set))  # its byte is in the pipe when the first one's is read
    coordinator.start()
    try:
        assert done.wait(20)
    finally:
        coordinator.finish()


def test_the_node_that_keeps_the_list_is_told_to_end():
    job = Job()
    job.come(1, 2)
    job.news()
    job.nodes.give_up(NodeFailure(0, None, 143, False, "", 15))
    assert [(m["kind"], m["exit_code"], m["failure"]["stopped_by"]) for m in job.told[2]] == [("end", 143, 15)]
    job.nodes.lose(1)
    assert job.said == []
    assert str(job.nodes.verdict.failure) == "node 0 was told to end (SIGTERM)"
