//! Runs the table: as libtest would show it, ranks as processes or as tasks.

mod processes;
mod tasks;

pub use tasks::run_in_tasks;

use crate::{Ctx, Fixture, Ranks, cases};
use flashboot_core::Readiness;
use futures_util::future::BoxFuture;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::{fmt, future::Future, process::ExitCode, sync::Arc, time::Duration};

/// A case may take this long in real time.
pub(crate) const CASE_DEADLINE: Duration = Duration::from_secs(90);

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

/// The main function of a backend's conformance test. Reads libtest's arguments, `FLASHBOOT_REQUIRE`, and what
/// a parent tells its ranks.
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
    drop(fixture);
    let trials = cases::table().into_iter().map(|case| {
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
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}

fn run(make: Make, ranks: Ranks, case: &Case) -> Outcome {
    match ranks {
        Ranks::Tasks => run_in_tasks(make(), case),
        Ranks::Processes => processes::run(case),
    }
}
