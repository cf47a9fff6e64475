//! `flashboot ls`.

use super::Which;
use crate::{
    exit::{Code, Failure},
    human,
    output::Output,
    settings::Overrides,
    table::{Side, Table},
    verbs::replicate::runtime,
};
use clap::Args;
use flashboot::{
    agent::{self, State, Status},
    config::Config,
};

#[derive(Debug, Args)]
pub(crate) struct LsArgs {
    #[command(flatten)]
    which: Which,
}

impl LsArgs {
    pub(in crate::verbs) fn overrides(&self, into: &mut Overrides) {
        self.which.overrides(into);
    }
}

pub(crate) fn run(_: &LsArgs, config: &Config, output: Output) -> Result<Code, Failure> {
    let runtime = runtime(false)?;
    let status = runtime.block_on(agent::status(config));
    runtime.shutdown_background();
    let status = status?;
    output.result(&status, || text(&status))?;
    Ok(Code::SUCCESS)
}

fn text(status: &Status) -> String {
    let mut table = Table::new(&[
        ("image", Side::Left),
        ("rank", Side::Left),
        ("at", Side::Left),
        ("bytes", Side::Right),
        ("state", Side::Left),
        ("priority", Side::Right),
        ("attached", Side::Right),
        ("idle", Side::Right),
    ]);
    for listed in &status.entries {
        let entry = &listed.entry;
        let what = if entry.held { "held" } else { "staged" };
        let state = match entry.state {
            State::Ready => what.to_owned(),
            State::Waiting => format!("{what}: waiting"),
            State::Filling => {
                format!("{what}: {}%", u128::from(listed.verified) * 100 / u128::from(entry.bytes.max(1)))
            }
        };
        let lease =
            entry.lease_left_ms.map_or_else(String::new, |left| format!(", {} left", human::ms(left as f64)));
        table.row(vec![
            entry.image.chars().take(12).collect(),
            entry.rank.clone(),
            entry.place.to_string().chars().take(12).collect(),
            human::bytes(entry.bytes),
            state + &lease,
            entry.priority.to_string(),
            entry.attached.to_string(),
            human::ms(entry.idle_ms as f64),
        ]);
    }
    format!(
        "{}{} of {} of host memory, {} pinned\n",
        if status.entries.is_empty() { String::new() } else { table.render() },
        human::bytes(status.used),
        human::bytes(status.limit),
        human::bytes(status.pinned)
    )
}
