//! `flashboot advise`: which topology, chunk and number of seeds a modelled machine is filled with soonest, and why.

use super::simulate::{Machine, failure, validation};
use crate::{
    exit::{Code, Failure},
    human,
    output::Output,
    table::{Side, Table},
};
use clap::Args;
use flashboot_core::ByteSize;
use flashboot_sim::{Advice, Goal, Tried, advise};
use serde_json::{Value, json};
use std::fmt::Write as _;

#[derive(Debug, Args)]
pub(crate) struct AdviseArgs {
    #[command(flatten)]
    machine: Machine,
    /// The last clone is to be ready within this time [default: as soon as one seed can]
    #[arg(long, value_name = "DURATION")]
    within: Option<humantime::Duration>,
    /// The most seeds that there can be
    #[arg(long, value_name = "N", default_value_t = 8)]
    seeds: u32,
}

pub(crate) fn run(args: &AdviseArgs, output: Output) -> Result<Code, Failure> {
    let profile = args.machine.profile()?;
    let within_ms = args.within.map(|within| within.as_secs_f64() * 1e3);
    let goal = Goal { within_ms, most_seeds: args.seeds };
    let advice = advise(&profile, &args.machine.scenario(), goal).map_err(failure)?;
    let Advice { best, outcome, meets, why, tried } = &advice;
    let object = json!({
        "profile": profile.name,
        "validated": profile.validated,
        "topology": best.topology.to_string(),
        "seeds": best.seeds,
        "chunk_bytes": best.chunk,
        "first_ms": best.filled.first_ms,
        "last_ms": best.filled.last_ms,
        "mean_ms": best.filled.mean_ms,
        "clones": outcome.clones,
        "meets": meets,
        "why": why,
        "tried": tried.iter().map(one).collect::<Vec<_>>(),
    });
    output.result(&object, || {
        let mut text = format!(
            "{}: {}\n{}\n\n{}, {}, chunks of {}: first {}, last {}\n",
            profile.name,
            profile.about,
            validation(&profile),
            best.topology,
            human::count(u64::from(best.seeds), "seed"),
            ByteSize(best.chunk),
            human::ms(best.filled.first_ms),
            human::ms(best.filled.last_ms),
        );
        if *meets == Some(false) {
            text += "which is later than wanted\n";
        }
        for sentence in why {
            let _ = writeln!(text, "- {sentence}");
        }
        text + "\n" + &table(tried)
    })?;
    Ok(Code::SUCCESS)
}

fn one(t: &Tried) -> Value {
    json!({
        "topology": t.topology.to_string(),
        "seeds": t.seeds,
        "chunk_bytes": t.chunk,
        "first_ms": t.filled.first_ms,
        "last_ms": t.filled.last_ms,
    })
}

fn table(tried: &[Tried]) -> String {
    let mut table = Table::new(&[
        ("topology", Side::Left),
        ("seeds", Side::Right),
        ("chunk", Side::Right),
        ("first", Side::Right),
        ("last", Side::Right),
        ("busiest link", Side::Left),
    ]);
    for t in tried {
        let busiest = t.busiest.as_ref();
        table.row(vec![
            t.topology.to_string(),
            t.seeds.to_string(),
            ByteSize(t.chunk).to_string(),
            human::ms(t.filled.first_ms),
            human::ms(t.filled.last_ms),
            busiest.map_or_else(String::new, |(link, used)| format!("{link}, {:.0} %", used * 100.0)),
        ]);
    }
    table.render()
}
