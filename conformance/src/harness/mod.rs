//! Runs the table: as libtest would show it, ranks as processes or as tasks.

mod processes;
mod tasks;

pub use tasks::run_in_tasks;

use crate::{
    Ctx, Fixture, Ranks,
    cases::{self, kills},
};
use flashboot_core::Readiness;
use futures_util::future::BoxFuture;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::{fmt, future::Future, process::ExitCode, sync::Arc, time::Duration};

/// A case may take this long in real time.
pub(crate) const CASE_DEADLINE: Duration = Duration::from_secs(90);

/// The most cases at once, unless `--test-threads` says otherwise.
const CASES_AT_ONCE: usize = 10;

/// What makes a fixture.
pub(crate) type Make = fn() -> Box<dyn Fixture>;

/// How a case ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Every rank ended well.
    Passed,
    /// What the first rank that failed said.
    Failed(String),
}

type Run = Arc<dyn Fn(Ctx) -> BoxFuture<'static, ()> + Send + Sync>;

/// One case of the table.
#[derive(Clone)]
pub struct Case {
    pub(crate) name: String,
    pub(crate) ranks: u32,
    pub(crate) run: Run,
}

impl Case {
    pub(crate) fn new<F, Fut>(name: String, ranks: u32, run: F) -> Self
    where
        F: Fn(Ctx) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        Self { name, ranks, run: Arc::new(move |ctx| Box::pin(run(ctx))) }
    }

    /// Its name, stable between releases.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Case({}, {} ranks)", self.name, self.ranks)
    }
}

/// Every case.
pub fn table() -> Vec<Case> {
    cases::table()
}

/// Draws more deaths than the table has; see `kills::Drawn`.
const KILLS: &str = "FLASHBOOT_CONFORMANCE_KILLS";

/// Every case, and those that the environment asks for beside them.
///
/// # Panics
/// When what it asks for is not understood.
fn all() -> Vec<Case> {
    let mut table = table();
    if let Ok(text) = std::env::var(KILLS) {
        let drawn = kills::Drawn::parse(&text);
        let drawn =
            drawn.unwrap_or_else(|| panic!("{KILLS}={text:?}: try times=10,chunks=32,chunk_mib=64,seed=1"));
        kills::drawn(&mut table, drawn);
    }
    table
}

/// How long memory of processes that are gone may take to be free again.
const RECLAIM: Duration = Duration::from_secs(20);

/// Waits until the devices have as much free as before the cases ran.
fn memory_is_back(fixture: &dyn Fixture, before: u64) -> bool {
    let began = std::time::Instant::now();
    loop {
        let Some(free) = fixture.free_memory() else { return false };
        if free >= before {
            println!("free memory of the devices is back: {free} bytes, as before");
            return true;
        }
        if began.elapsed() > RECLAIM {
            println!("FAILED: {} bytes of the devices' memory did not come back", before - free);
            return false;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The main function of a backend's conformance test. Reads libtest's arguments, `FLASHBOOT_REQUIRE`, and what
/// a parent tells its ranks. Where the fixture can tell, the devices' free memory must be back when all cases are over.
pub fn main(make: Make) -> ExitCode {
    if let Some(rank) = processes::ChildOf::parent() {
        return processes::run_rank(make, &rank);
    }
    let fixture = make();
    let name = fixture.name();
    let required = std::env::var("FLASHBOOT_REQUIRE")
        .is_ok_and(|list| list.split(',').any(|wanted| wanted.trim() == name));
    let absent = match fixture.readiness() {
        Readiness::Ready => None,
        Readiness::Unavailable { reason, remedy } => Some(format!("{reason}; {remedy}")),
    };
    let ranks = fixture.ranks();
    let mut args = Arguments::from_args();
    // A case has up to eight processes, and a driver makes their contexts one after the other: with more cases at once
    // (a machine of 32 cores, two GPUs) they wait for one another until a deadline that is not theirs to keep.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    args.test_threads = args.test_threads.or(Some(cores.min(CASES_AT_ONCE)));
    let before = if absent.is_none() && !args.list { fixture.free_memory() } else { None };
    let trials = all().into_iter().map(|case| {
        let (title, absent) = (case.name.clone(), absent.clone());
        let trial = Trial::ignorable_test(title, move || match absent {
            Some(reason) if required => Err(Failed::from(format!("{name} is required here: {reason}"))),
            Some(reason) => Ok(Completion::ignored_with(reason)),
            None => match run(make, ranks, &case) {
                Outcome::Passed => Ok(Completion::Completed),
                Outcome::Failed(why) => Err(Failed::from(why)),
            },
        });
        trial.with_kind(name)
    });
    let ended = libtest_mimic::run(&args, trials.collect());
    if before.is_some_and(|before| !memory_is_back(&*fixture, before)) {
        return ExitCode::FAILURE;
    }
    ended.exit_code()
}

fn run(make: Make, ranks: Ranks, case: &Case) -> Outcome {
    match ranks {
        Ranks::Tasks => run_in_tasks(make(), case),
        Ranks::Processes => processes::run(case),
    }
}
