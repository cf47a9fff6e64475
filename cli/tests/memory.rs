//! Memory as a contract: a whole load stays within its budget and a fixed overhead, and what a load or an agent took is given
//! back. Of this host's memory: on the stand-in driver a GPU's is shared memory, which is counted apart.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;

use common::{MIB, Place, fleet::Proc, object, said, stand_in::Driver, text};
use libtest_mimic::{Arguments, Trial};
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    thread,
    time::{Duration, Instant},
};

/// Bytes of the image: several times the budget, and more than what may stay behind.
const PAYLOAD: usize = 192 * MIB;
const BUDGET: usize = 32 * MIB;
/// What a load takes beside its budget, whatever it loads: the program, its threads, a driver's own, the tables of a small image.
const OVERHEAD: usize = 48 * MIB;
/// What may stay behind.
const BASELINE: usize = 64 * MIB;
const LIMIT: Duration = Duration::from_secs(120);

/// Bytes of a process that are resident: of its own, and of shared memory.
#[derive(Debug, Clone, Copy, Default)]
struct Resident {
    own: usize,
    shared: usize,
}

impl Resident {
    /// Nothing, once it is gone.
    fn of(process: u32) -> Option<Self> {
        let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        let kib = |name: &str| -> Option<usize> {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.trim().strip_suffix("kB")?.trim().parse().ok()
        };
        Some(Self { own: kib("RssAnon")? << 10, shared: kib("RssShmem")? << 10 })
    }

    fn all(self) -> usize {
        self.own + self.shared
    }
}

/// A load of `image` into a GPU of the stand-in, within the budget.
fn load(place: &Place, driver: &Driver, image: &Path) -> Command {
    driver.on(place.flashboot(&[
        "load",
        text(image),
        "--device",
        "cuda:0",
        "--budget",
        &BUDGET.to_string(),
        "--window",
        "4MiB",
        "--json",
    ]))
}

fn is_bounded(report: &Value) {
    assert_eq!(report["verified"], true);
    assert_eq!(report["bytes"].as_u64().unwrap() as usize / MIB, PAYLOAD / MIB);
    let peak = report["peak_host_bytes"].as_u64().unwrap() as usize;
    assert!(peak > 0 && peak <= BUDGET, "{report}");
}

fn a_whole_load_takes_no_more_of_the_host_than_its_budget_and_a_fixed_overhead() {
    let place = Place::new();
    let image = place.image("m", &[("a", PAYLOAD)]);
    let driver = Driver::new(&place);
    let mut child = load(&place, &driver, &image).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut peak = Resident::default();
    let began = Instant::now();
    // A zombie has no memory.
    while let Some(now) = Resident::of(child.id()) {
        peak = Resident { own: peak.own.max(now.own), shared: peak.shared.max(now.shared) };
        assert!(began.elapsed() < LIMIT, "it has not ended");
        thread::sleep(Duration::from_millis(1));
    }
    let status = child.wait().unwrap();
    let mut said = String::new();
    std::io::Read::read_to_string(&mut child.stdout.take().unwrap(), &mut said).unwrap();
    assert!(status.success(), "{said}");
    is_bounded(&serde_json::from_str(&said).unwrap());
    let overhead = peak.own.saturating_sub(BUDGET);
    println!("peak {} of {} budget and {} overhead", peak.own, BUDGET, OVERHEAD);
    assert!(peak.own > 0 && overhead <= OVERHEAD, "{} bytes beside a budget of {BUDGET}", overhead);
}

fn an_agent_gives_back_what_it_staged_pushed_and_held() {
    let place = Place::new();
    let image = place.image("m", &[("a", PAYLOAD)]);
    let driver = Driver::new(&place);
    let sockets = place.path("sockets");
    let on =
        |args: &[&str]| driver.on(place.flashboot(&[args, &["--agent", text(&sockets), "--json"]].concat()));
    let run = |args: &[&str]| {
        let output = on(args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", said(&output));
        object(&output)
    };
    let mut agent = Proc::start(on(&["agent", "--limit", "1GiB"]));
    let _ready = agent.object();
    let before = Resident::of(agent.child.id()).unwrap();
    for round in 0..3 {
        run(&["stage", text(&image)]);
        let full = Resident::of(agent.child.id()).unwrap();
        assert!(full.all() >= before.all() + PAYLOAD - MIB, "round {round}: {full:?} after {before:?}");
        assert_eq!(run(&["load", text(&image), "--device", "cuda:0"])["source"], "staged");
        run(&["hold", text(&image), "--device", "cuda:1"]);
        assert_eq!(run(&["load", text(&image), "--device", "cuda:1"])["source"], "held");
        // An engine's end is noticed a moment after it.
        let began = Instant::now();
        while run(&["ls"])["entries"].as_array().unwrap().iter().any(|entry| entry["attached"] != 0) {
            assert!(began.elapsed() < LIMIT, "the engines have gone");
            thread::sleep(Duration::from_millis(20));
        }
        run(&["evict", "--all"]);
        let after = Resident::of(agent.child.id()).unwrap();
        println!("round {round}: {before:?}, full {full:?}, after {after:?}");
        assert!(after.all() <= before.all() + BASELINE, "round {round}: {after:?} after {before:?}");
    }
}

/// A control group below this process's own, gone when dropped.
struct Group(PathBuf);

impl Group {
    /// Where memory can be limited for a group below ours, else why not.
    fn new() -> Result<Self, String> {
        let groups = fs::read_to_string("/proc/self/cgroup").map_err(|e| e.to_string())?;
        let own = groups.lines().find_map(|line| line.strip_prefix("0::/"));
        let own = own.ok_or("there is no control group of version 2")?;
        let parent = Path::new("/sys/fs/cgroup").join(own);
        let kinds = fs::read_to_string(parent.join("cgroup.subtree_control"));
        let kinds = kinds.map_err(|_| "control groups of version 2 are not at /sys/fs/cgroup".to_owned())?;
        if !kinds.split_whitespace().any(|kind| kind == "memory") {
            return Err("this control group delegates no memory to those below it".into());
        }
        let group = Self(parent.join(format!("flashboot-test-{}", std::process::id())));
        fs::create_dir(&group.0).map_err(|e| format!("a control group below this one: {e}"))?;
        // Said by the kernel when the directory is made; without it there is nothing to set.
        match group.0.join("memory.max").exists() {
            true => Ok(group),
            false => Err("a control group below this one has no memory.max".into()),
        }
    }

    fn set(&self, name: &str, value: usize) -> std::io::Result<()> {
        fs::write(self.0.join(name), value.to_string())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Its process has ended.
        let _ = fs::remove_dir(&self.0);
    }
}

fn a_whole_load_runs_under_memory_max_of_its_budget_and_a_fixed_overhead() {
    let group = Group::new().unwrap();
    let place = Place::new();
    let image = place.image("m", &[("a", PAYLOAD)]);
    let driver = Driver::new(&place);
    // The stand-in's GPU is the host's memory, and the group's.
    let device = PAYLOAD + 4 * MIB;
    group.set("memory.max", device + BUDGET + OVERHEAD).unwrap();
    // Nothing may be put elsewhere; where nothing can be, there is no such file.
    let _ = group.set("memory.swap.max", 0);
    // It is in the group before it takes any memory.
    let command = load(&place, &driver, &image);
    let mut shell = Command::new("sh");
    shell.args(["-c", "echo $$ > \"$0\"/cgroup.procs && exec \"$@\""]).arg(&group.0);
    shell.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    let output = shell.current_dir(command.get_current_dir().unwrap()).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    is_bounded(&object(&output));
    let peak = fs::read_to_string(group.0.join("memory.peak")).unwrap_or_else(|_| "unknown".into());
    println!("memory.max {device} for the GPU + {BUDGET} budget + {OVERHEAD} overhead; peak {}", peak.trim());
}

fn main() -> ExitCode {
    let run = |name: &str, test: fn()| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    let name = "a_whole_load_runs_under_memory_max_of_its_budget_and_a_fixed_overhead";
    let limited = run(name, a_whole_load_runs_under_memory_max_of_its_budget_and_a_fixed_overhead);
    let limited = match Group::new() {
        Ok(_) => limited,
        Err(why) => limited
            .with_kind(format!("not run here: needs a control group to limit memory in ({why})"))
            .with_ignored_flag(true),
    };
    let trials = vec![
        run(
            "a_whole_load_takes_no_more_of_the_host_than_its_budget_and_a_fixed_overhead",
            a_whole_load_takes_no_more_of_the_host_than_its_budget_and_a_fixed_overhead,
        ),
        run(
            "an_agent_gives_back_what_it_staged_pushed_and_held",
            an_agent_gives_back_what_it_staged_pushed_and_held,
        ),
        limited,
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
