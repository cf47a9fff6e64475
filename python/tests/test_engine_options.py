"""What the engines' plugins share, without an engine: settings, sources in order, what is refused, what is served."""

import logging

import pytest
import torch

import flashboot
import flashboot.torch
from flashboot import _engine, errors
from flashboot._engine import Boot, Options, Rank
from toys import assert_same

ENGINE = ("toy", "1")


def make():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))


@pytest.fixture
def model():
    torch.manual_seed(4)
    return make()


@pytest.fixture
def image(model, tmp_path):
    return flashboot.torch.capture(model, tmp_path / "image", engine=ENGINE, model_config='{"model_type": "toy"}')


@pytest.fixture(autouse=True)
def nobody_serves():
    yield
    _engine.released()


def boot(given, **more):
    return Boot(Options.read(given), engine=ENGINE, rank=more.pop("rank", Rank()), **more)


def test_settings_that_are_not_known_or_cannot_be_are_refused_by_name():
    for given, said in [
        ({"sorces": ["peer"]}, "'sorces'"),
        ({"sources": ["pear"]}, "'pear'"),
        ({"sources": ["peer", "peer"]}, "twice"),
        ({"sources": []}, "empty"),
        ({"sources": "peer"}, "sources='peer'"),
        ({"publish": "yes"}, "publish='yes'"),
        ({"publish": 1}, "publish=1"),
        ({"publish": True}, "rendezvous"),
        ({"on_mismatch": "shrug"}, "fail, checkpoint"),
        ({"attach": "mine"}, "shared, private"),
        ({"stage": "sliced"}, "engine-params, kernel-ready"),
        ({"patience": True}, "patience=True"),
        ({"patience": 0}, "patience=0"),
        ({"image": 5}, "image=5"),
        ({"gather": 4}, "'gather'"),
        ([], "list"),
    ]:
        with pytest.raises(errors.InvalidError) as caught:
            Options.read(given)
        assert said in str(caught.value), caught.value
    assert Options.read(None) == Options.read({}) == Options()


def test_sources_are_asked_in_order_and_each_that_is_passed_over_says_why(image, tmp_path, caplog):
    caplog.set_level(logging.INFO, "flashboot")
    places = {"image": str(image.path), "rendezvous": "127.0.0.1:1", "patience": 0.2}
    made = boot({"sources": ["object", "peer", "image", "checkpoint"], **places})
    arena = made.arena()
    assert arena.image_id == image.id and arena.report["source"] == "image"
    assert [kind for kind, _, _ in made.skipped] == ["object", "peer"]
    assert "passed over object: object does not say where" in caplog.text
    assert "passed over peer (127.0.0.1:1)" in caplog.text


def test_the_checkpoint_is_the_engines_turn_and_what_comes_after_it_is_not_asked(image, tmp_path):
    made = boot({"sources": ["checkpoint", "image"], "image": str(image.path)})
    assert made.arena() is None
    assert made.skipped[0][0] == "image"
    made = boot({"image": str(tmp_path / "nowhere")})
    assert made.arena() is None and "nowhere" in made.skipped[0][2]
    assert boot({}).arena() is None


def test_without_the_checkpoint_nothing_is_an_error(tmp_path):
    with pytest.raises(flashboot.FlashbootError, match="nowhere"):
        boot({"sources": ["image"], "image": str(tmp_path / "nowhere")}).arena()
    with pytest.raises(errors.UnavailableError, match="peer: rendezvous does not say where"):
        boot({"sources": ["peer"]}).arena()


def test_a_stage_that_the_engine_cannot_use_is_refused_with_what_to_do(image, tmp_path):
    arena = flashboot.load(image.path)
    assert boot({}).fits(arena, model_type="toy")
    for refused, said in [
        (dict(model_type="other"), "of a toy, the model is a other"),
        (dict(bindable=False), "draft"),
    ]:
        with pytest.raises(errors.MismatchError, match=said):
            boot({}).fits(arena, **refused)
    with pytest.raises(errors.MismatchError, match="toy 1, this is toy 2"):
        Boot(Options(), engine=("toy", "2"), rank=Rank()).fits(arena)
    made = boot({"on_mismatch": "checkpoint"})
    assert not made.fits(arena, model_type="other") and "on_mismatch=checkpoint" in made.skipped[0][2]


def test_what_the_agent_holds_is_not_post_processed_and_not_counted_as_the_engines_own(image):
    arena = flashboot.load(image.path)
    own = boot({})
    assert own.external(arena) == 0

    class Held:
        """An arena as one is that the agent holds."""

        report = {**arena.report, "source": "held"}
        stage, fingerprint, nbytes = arena.stage, arena.fingerprint, arena.nbytes

    assert own.external(Held) == arena.nbytes
    assert boot({"attach": "private"}).external(Held) == 0
    with pytest.raises(errors.MismatchError, match="kernel-ready.*attach=private"):
        own.fits(Held)
    assert boot({"attach": "private"}).fits(Held)


def test_an_engine_that_writes_its_weights_is_refused_shared_memory_by_its_setting(image):
    held = {"sources": ["held", "image"], "image": str(image.path)}
    with pytest.raises(errors.NotPermittedError, match="--enable-eplb.*attach=private"):
        boot(held, writes=["--enable-eplb"])
    with pytest.raises(errors.NotPermittedError, match="--enable-eplb"):
        boot({"publish": True, "embed": "127.0.0.1:0"}, writes=["--enable-eplb"])
    # Where nobody asked for it by name it is passed over.
    made = boot({"image": str(image.path)}, writes=["--enable-eplb"])
    assert made.arena().report["source"] == "image"
    assert made.skipped[0][0] == "held" and "--enable-eplb" in made.skipped[0][2]


def test_what_is_written_is_written_once_and_for_each_rank_apart(model, tmp_path):
    path = tmp_path / "written"
    boot({"write_image": str(path)}).wrote(model, "engine-params")
    first = flashboot.Image(path)
    torch.nn.init.zeros_(model[0].weight)
    boot({"write_image": str(path)}).wrote(model, "engine-params")
    boot({"write_image": str(tmp_path / "other")}).wrote(model, "kernel-ready")
    assert flashboot.Image(path).id == first.id and not (tmp_path / "other").exists()
    rank = Rank(tp=1, world=(1, 2, 1, 1))
    boot({"write_image": str(tmp_path / "ranks")}, rank=rank).wrote(model, "engine-params")
    written = flashboot.Image(tmp_path / "ranks" / "target-0-1-0-0")
    assert written.ranks == ["target-0-1-0-0"] and written.metadata["layout"]["world"]["tp"] == 2
    again = boot({"image": str(tmp_path / "ranks"), "sources": ["image"]}, rank=rank)
    assert again.arena().image_id == written.id
    with pytest.raises(flashboot.FlashbootError, match="target-0-0-0-0"):
        boot({"image": str(tmp_path / "ranks"), "sources": ["image"]}, rank=Rank(world=(1, 2, 1, 1))).arena()


def test_a_live_model_is_served_without_being_written_until_it_is_updated(model, tmp_path, monkeypatch):
    made = boot({"publish": True, "embed": "127.0.0.1:0", "model": "live"})
    made.wrote(model, "engine-params", model_config='{"model_type": "toy"}')
    seed = _engine._BOUND[-1].seed
    other = boot({"sources": ["peer"], "rendezvous": seed.rendezvous, "model": "live"})
    arena = other.arena()
    assert arena.report["source"] == "peer" and other.fits(arena, model_type="toy")
    with torch.device("meta"):
        bound = make()
    assert_same(
        flashboot.torch.bind(bound, arena, engine=ENGINE), model.requires_grad_(False)
    )
    _engine.before_update("update")
    assert not seed.serving
    with pytest.raises(flashboot.FlashbootError):
        boot({"sources": ["peer"], "rendezvous": seed.rendezvous, "model": "live", "patience": 0.3}).arena()


def test_an_arena_that_was_changed_is_not_served(image):
    arena = flashboot.load(image.path)
    with flashboot.seed(arena, embed="127.0.0.1:0", model="toy") as seed:
        clone = flashboot.clone(seed.rendezvous, image_id=image.id)
        assert clone.verify() > 0
    # What was cloned is served on, too.
    with flashboot.seed(clone, embed="127.0.0.1:0", model="toy") as seed:
        assert flashboot.clone(seed.rendezvous, image_id=image.id).nbytes == image.nbytes()
    flashboot.torch.state_dict(arena)["0.weight"].zero_()
    with pytest.raises(errors.CorruptError):
        flashboot.seed(arena, embed="127.0.0.1:0", model="toy")


def test_a_compact_capture_is_the_image_that_would_have_been_written(model, image, tmp_path):
    arena = flashboot.torch.compact(model, engine=ENGINE, model_config='{"model_type": "toy"}')
    assert arena.image_id == image.id and arena.fingerprint == image.fingerprint
    assert arena.memoryview() == flashboot.load(image.path).memoryview()
    assert arena.verify() == 1 and arena.report["source"] == "live"
    with pytest.raises(errors.FlashbootError, match="target-0-2-0-0"):
        flashboot.torch.compact(model, rank="target-0-2-0-0", world=(1, 2, 1, 1))
    with pytest.raises(errors.InvalidError, match="no rank"):
        flashboot.torch.compact(model, rank="target-0-2")
