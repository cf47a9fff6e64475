//! What takes a process of its own: a packer killed at any moment, a full disk, a user without permission.
//!
//! The binary runs itself again with `child NAME DIR` as arguments; without them it is a test harness.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test may panic")]

mod support;

use flashboot_checkpoint::{
    Error, Image, LayoutOptions, OpenOptions, PackOptions, Parallel, UnpackOptions, VerifyOptions, inspect,
    pack, pack_ranks, unpack, verify,
};
use flashboot_core::{ByteSize, Dtype, Kind};
use libtest_mimic::{Arguments, Trial};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use support::models::{Sizes, llama};
use support::{file, names, open, packed, sharded, small_moe, tensor};
use tempfile::TempDir;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    if let [_, child, name, dir] = args.as_slice()
        && child == "child"
    {
        let dir = Path::new(dir);
        match name.as_str() {
            "pack" => {
                let checkpoint = open(&dir.join("m")).unwrap();
                pack(&checkpoint, &dir.join("i"), &PackOptions::default(), &()).unwrap();
            }
            "replace" => {
                let options = PackOptions { replace: true, ..PackOptions::default() };
                pack(&open(&dir.join("m")).unwrap(), &dir.join("i"), &options, &()).unwrap();
            }
            "unpack" => {
                let image = Image::open(&dir.join("i")).unwrap();
                unpack(&image, &dir.join("b"), &UnpackOptions::default(), &()).unwrap();
            }
            "without-permission" => without_permission(dir),
            "pack-ranks" => pack_ranks_to_the_half(dir),
            "on-a-full-disk" => on_a_full_disk(dir),
            other => panic!("no child {other}"),
        }
        return ExitCode::SUCCESS;
    }
    let mounts = succeeds(Command::new("unshare").args(["-m", "true"]));
    // Root passes every permission, so its child becomes nobody; anybody else is refused as they are.
    let refusable = !rustix::process::geteuid().is_root() || succeeds(&mut as_nobody("true"));
    let trial = |name: &str, needs: &str, can: bool, run: fn()| {
        let trial = Trial::test(name, move || {
            run();
            Ok(())
        });
        if can {
            trial
        } else {
            trial.with_kind(format!("not run here: needs {needs}")).with_ignored_flag(true)
        }
    };
    let trials = vec![
        trial("a_killed_pack_leaves_a_whole_image_or_none", "", true, killed_packs),
        trial("a_killed_pack_of_many_ranks_is_gone_on_from", "", true, killed_ranks),
        trial("a_killed_replacement_leaves_the_old_image_or_the_new", "", true, killed_replacements),
        trial("a_killed_unpack_leaves_a_whole_checkpoint_or_none", "", true, killed_unpacks),
        trial("eacces_is_a_permission_and_not_a_missing_file", "setpriv to become nobody", refusable, eacces),
        trial("a_full_disk_says_its_numbers_and_leaves_nothing", "unshare -m and mount", mounts, full_disk),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn succeeds(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

fn as_nobody(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", program]);
    command
}

/// Runs a child to its end; what it said is in the panic if it failed.
fn run(mut command: Command, name: &str, dir: &Path) {
    let output = command.args(["child", name]).arg(dir).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn exe() -> String {
    std::env::current_exe().unwrap().to_str().unwrap().to_owned()
}

fn start(name: &str, dir: &Path) -> Child {
    Command::new(exe()).args(["child", name]).arg(dir).spawn().unwrap()
}

const ROUNDS: u32 = 30;

/// Kills the child `name` at 30 moments spread over the time that it takes; `check` looks at what is there.
fn kill_rounds(dir: &Path, name: &str, dest: &str, keep: bool, check: impl Fn(bool)) {
    // The fastest of three undisturbed runs: kills that are spread over a slow one mostly come too late.
    let undisturbed = (0..3).map(|_| {
        if !keep && dir.join(dest).exists() {
            std::fs::remove_dir_all(dir.join(dest)).unwrap();
        }
        let begun = Instant::now();
        assert!(start(name, dir).wait().unwrap().success());
        begun.elapsed()
    });
    let mut whole = undisturbed.min().unwrap();
    let begun = Instant::now();
    let (mut killed, mut leavings) = (0, 0);
    for round in 0..ROUNDS {
        if !keep && dir.join(dest).exists() {
            std::fs::remove_dir_all(dir.join(dest)).unwrap();
        }
        let mut child = start(name, dir);
        // Every thirtieth of the time once, with some jitter inside it; the last ones often come too late.
        let jitter = f64::from(begun.elapsed().subsec_nanos() % 1000) / 1000.0;
        std::thread::sleep(Duration::from_secs_f64(
            whole.as_secs_f64() * (f64::from(round) + jitter) / f64::from(ROUNDS),
        ));
        child.kill().unwrap();
        let in_time = !child.wait().unwrap().success();
        killed += u32::from(in_time);
        if !in_time && round < ROUNDS / 2 {
            // The machine has become quicker since it was timed.
            whole = whole.mul_f64(0.8);
        }
        leavings += names(dir).iter().filter(|n| n.contains(".partial-")).count();
        check(dir.join(dest).exists());
    }
    assert!(killed >= ROUNDS / 3, "only {killed} of {ROUNDS} kills came in time");
    assert!(leavings > 0, "no kill came in the middle of the writing");
    if !keep && dir.join(dest).exists() {
        std::fs::remove_dir_all(dir.join(dest)).unwrap();
    }
    assert!(start(name, dir).wait().unwrap().success());
    check(true);
    assert!(dir.join(dest).exists());
    assert!(!names(dir).iter().any(|n| n.contains(".partial-")), "the next run cleans up: {:?}", names(dir));
}

fn big_model(dir: &Path) {
    let big = |i: usize| tensor(&format!("layers.{i}.experts.0.w"), Dtype::U8, &[12 << 20]);
    sharded(&dir.join("m"), &[vec![big(0), big(1)], vec![big(2), tensor("rest", Dtype::F32, &[9])]]);
}

fn whole_image(dir: &Path) -> impl Fn(bool) {
    let path = dir.join("i");
    move |there| {
        if there {
            let image = Image::open(&path).expect("what is there is whole");
            assert!(verify(&image, &VerifyOptions::default(), &()).unwrap().ok);
        }
    }
}

fn killed_packs() {
    let dir = TempDir::new().unwrap();
    big_model(dir.path());
    kill_rounds(dir.path(), "pack", "i", false, whole_image(dir.path()));
}

/// What the child and its parent pack alike.
fn two_ranks() -> (LayoutOptions, PackOptions) {
    let parallel = Parallel { tp: 2, ..Parallel::default() };
    let options = PackOptions { resume: true, sync_every: ByteSize::mib(1), ..PackOptions::default() };
    (LayoutOptions { parallel, ..LayoutOptions::default() }, options)
}

fn killed_ranks() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    let sizes = Sizes { hidden: 1024, mlp: 2048, vocab: 4096, ..Sizes::default() };
    llama(&sizes).write(&at("m"), 2);
    let mut child = start("pack-ranks", dir.path());
    let begun = Instant::now();
    while !at("half").exists() {
        assert!(begun.elapsed() < Duration::from_secs(60), "the child does not get to the half");
        assert!(child.try_wait().unwrap().is_none(), "the child has ended");
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!at("i").exists() && names(dir.path()).iter().any(|n| n.contains(".partial-")));
    let (layout, options) = two_ranks();
    let checkpoint = open(&at("m")).unwrap();
    let went_on = pack_ranks(&checkpoint, &at("i"), &layout, &options, &()).unwrap();
    assert!(went_on.resumed > 0, "{went_on:?}");
    let fresh = PackOptions::default();
    pack_ranks(&checkpoint, &at("whole"), &layout, &fresh, &()).unwrap();
    assert!(support::tree(&at("i")) == support::tree(&at("whole")));
    assert!(!names(dir.path()).iter().any(|n| n.contains(".partial-")));
}

/// The child's part: packs to the half, says so and waits to be killed.
fn pack_ranks_to_the_half(dir: &Path) {
    let (layout, options) = two_ranks();
    let wait = |done: u64, total: u64| {
        if done * 2 > total {
            // What was handed to the writers by now is written meanwhile.
            std::thread::sleep(Duration::from_millis(300));
            std::fs::write(dir.join("half"), "").unwrap();
            std::thread::sleep(Duration::from_secs(3600));
        }
    };
    pack_ranks(&open(&dir.join("m")).unwrap(), &dir.join("i"), &layout, &options, &wait).unwrap();
}

fn killed_replacements() {
    let dir = TempDir::new().unwrap();
    big_model(dir.path());
    let whole = whole_image(dir.path());
    kill_rounds(dir.path(), "replace", "i", true, |there| {
        assert!(there, "there is an image at every moment");
        whole(there);
    });
}

fn killed_unpacks() {
    let dir = TempDir::new().unwrap();
    big_model(dir.path());
    packed(&dir.path().join("m"), &dir.path().join("i"));
    let wanted = support::tree(&dir.path().join("m"));
    let back = dir.path().join("b");
    kill_rounds(dir.path(), "unpack", "b", false, |there| {
        assert!(!there || support::tree(&back) == wanted, "what is there is whole");
    });
}

fn eacces() {
    let mode = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let dir = TempDir::new().unwrap();
    mode(dir.path(), 0o755);
    let at = |name: &str| dir.path().join(name);
    std::fs::create_dir(at("closed")).unwrap();
    std::fs::write(at("closed/in.safetensors"), file(&[], &[], 0)).unwrap();
    sharded(&at("model"), &small_moe());
    packed(&at("model"), &at("image"));
    std::fs::write(at("ok.safetensors"), file(&[], &[], 0)).unwrap();
    std::fs::create_dir(at("read-only")).unwrap();
    // The child must be able to run this binary, wherever that was built.
    std::fs::copy(exe(), at("exe")).unwrap();
    mode(&at("exe"), 0o755);
    mode(&at("closed"), 0o000);
    mode(&at("model/model-00002-of-00002.safetensors"), 0o000);
    mode(&at("image/metadata.json"), 0o000);
    mode(&at("read-only"), 0o555);
    let program = at("exe").to_str().unwrap().to_owned();
    let root = rustix::process::geteuid().is_root();
    run(if root { as_nobody(&program) } else { Command::new(program) }, "without-permission", dir.path());
    mode(&at("closed"), 0o755);
}

fn without_permission(dir: &Path) {
    let at = |name: &str| dir.join(name);
    let denied = |op, path: &str| Error::NotPermitted { op, path: at(path) };
    assert_eq!(open(&at("closed/in.safetensors")).unwrap_err(), denied("stat", "closed/in.safetensors"));
    assert_eq!(open(&at("closed")).unwrap_err(), denied("readdir", "closed"));
    let shard = "model/model-00002-of-00002.safetensors";
    assert_eq!(open(&at("model")).unwrap_err(), denied("open", shard));
    assert_eq!(Image::open(&at("image")).map(|_| ()).unwrap_err(), denied("open", "image/metadata.json"));
    let inspected = inspect(&at("image"), &OpenOptions::default()).unwrap_err();
    assert_eq!(inspected, denied("open", "image/metadata.json"));
    assert_eq!(inspected.kind(), Kind::Permission);
    let checkpoint = open(&at("ok.safetensors")).unwrap();
    let refused = pack(&checkpoint, &at("read-only/image"), &PackOptions::default(), &()).unwrap_err();
    assert!(matches!(refused, Error::NotPermitted { op: "mkdir", .. }), "{refused:?}");
}

fn full_disk() {
    let dir = TempDir::new().unwrap();
    std::fs::create_dir(dir.path().join("small")).unwrap();
    let at = |name: &str| dir.path().join(name);
    for (name, bytes) in [("m", 6 << 20), ("m2", 2 << 20)] {
        let made = file(&[tensor("b", Dtype::U8, &[bytes])], &[], 0);
        std::fs::write(at(&format!("{name}.safetensors")), made).unwrap();
    }
    packed(&at("m.safetensors"), &at("i"));
    let script = "mount -t tmpfs -o size=4m none \"$0\" && exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", script]).arg(at("small")).arg(exe());
    run(command, "on-a-full-disk", dir.path());
}

fn on_a_full_disk(dir: &Path) {
    let at = |name: &str| dir.join(name);
    let small = at("small");
    let checkpoint = open(&at("m.safetensors")).unwrap();
    let full = |e: Error, path: &Path| {
        let Error::NoSpace { path: found_path, needed, found } = &e else { panic!("{e:?}") };
        assert_eq!(found_path, path);
        assert!(*needed > 6 << 20 && *found <= 4 << 20, "{e}");
        assert_eq!(e.kind(), Kind::Exhausted);
        assert_eq!(names(&small), [""; 0], "nothing is left");
    };
    let dest = small.join("image");
    full(pack(&checkpoint, &dest, &PackOptions::default(), &()).unwrap_err(), &dest);
    let image = Image::open(&at("i")).unwrap();
    let dest = small.join("model");
    full(unpack(&image, &dest, &UnpackOptions::default(), &()).unwrap_err(), &dest);

    // In the middle: there is room at the start, and somebody else takes it while the payload is written.
    let checkpoint = open(&at("m2.safetensors")).unwrap();
    let hog = small.join("hog");
    let fill = |_: u64, _: u64| {
        let mut hog = std::fs::File::create(&hog).unwrap();
        while std::io::Write::write_all(&mut hog, &[1; 4096]).is_ok() {}
    };
    let dest = small.join("image");
    let error = pack(&checkpoint, &dest, &PackOptions::default(), &fill).unwrap_err();
    assert!(matches!(&error, Error::NoSpace { path, .. } if *path == dest), "{error:?}");
    assert_eq!(names(&small), ["hog"], "nothing of ours is left");
    std::fs::remove_file(&hog).unwrap();
    assert!(pack(&checkpoint, &dest, &PackOptions::default(), &()).is_ok(), "and then there is room again");
}
