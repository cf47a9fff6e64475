//! Which shape, which chunk, how many seeds: by trying them, and saying why.

use crate::{Chunk, Error, Filled, Outcome, Profile, Scenario, Topology, simulate};
use flashboot_core::{BLOCK, ByteSize};
use std::{cmp::Ordering, collections::BTreeSet};

/// What is wanted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Goal {
    /// The last clone is to be ready in so many milliseconds; `None`: as soon as can be, from one seed.
    pub within_ms: Option<f64>,
    /// Seeds that there can be at most.
    pub most_seeds: u32,
}

/// One that was tried.
#[derive(Debug, Clone, PartialEq)]
pub struct Tried {
    /// The shape.
    pub topology: Topology,
    /// Seeds.
    pub seeds: u32,
    /// Bytes of one copy.
    pub chunk: u64,
    /// First, last, mean, of the clones that have everything.
    pub filled: Filled,
    /// Clones that live and gave up.
    pub failed: usize,
    /// The most used link and its use.
    pub busiest: Option<(String, f64)>,
}

/// What to do.
#[derive(Debug, Clone, PartialEq)]
pub struct Advice {
    /// The best that was tried.
    pub best: Tried,
    /// What came of the best, clone by clone.
    pub outcome: Outcome,
    /// Whether it is as quick as wanted; `None` where nothing was.
    pub meets: Option<bool>,
    /// Why, a sentence each.
    pub why: Vec<String>,
    /// Everything that was tried, in that order.
    pub tried: Vec<Tried>,
}

/// Clones above which the service's own placement is not tried: it looks at every member for every other.
const PLACED: u64 = 512;
/// What counts as the same time.
const SAME: f64 = 0.01;

/// Tries shapes, chunks and numbers of seeds for what `scenario` is to fill. Of two that are equally quick the simpler is advised:
/// fewer seeds, then star before chain before tree before placed.
///
/// # Errors
/// [`Error::Range`] for a gather or an impossible goal, and whatever a simulation fails with.
pub fn advise(profile: &Profile, scenario: &Scenario, goal: Goal) -> Result<Advice, Error> {
    let range = |option, given: String, possible| Err(Error::Range { option, given, possible });
    if let Some(ms) = goal.within_ms
        && !(ms > 0.0 && ms.is_finite())
    {
        return range("--within", format!("{ms} ms"), "a time above 0");
    }
    if goal.most_seeds == 0 {
        return range("--seeds", "0".into(), "at least 1");
    }
    let mut trial = Trial { profile, base: Scenario { spans: false, ..*scenario }, tried: Vec::new() };
    let mut seeds = scenario.seeds;
    let most = goal.most_seeds.max(seeds).min(scenario.clones);
    let mut best = trial.best_shape(seeds)?;
    let missed = |run: &Run| goal.within_ms.is_some_and(|within| !meets(run, within));
    while missed(&best) && seeds < most {
        seeds = seeds.saturating_mul(2).min(most);
        let next = trial.best_shape(seeds)?;
        // More seeds that bring nothing are not advised.
        best = quicker(Some(best), next);
    }
    let more = if best.0.seeds < scenario.clones && goal.within_ms.is_none() {
        let twice = Scenario { seeds: (best.0.seeds * 2).min(scenario.clones), ..best.0 };
        trial.run(twice).ok()
    } else {
        None
    };
    let meets = goal.within_ms.map(|within| meets(&best, within));
    let why = trial.why(&best, more.as_ref(), goal);
    let (scenario, filled, outcome) = best;
    let best = tried(&scenario, filled, &outcome);
    Ok(Advice { best, outcome, meets, why, tried: trial.tried })
}

type Run = (Scenario, Filled, Outcome);

struct Trial<'p> {
    profile: &'p Profile,
    base: Scenario,
    tried: Vec<Tried>,
}

fn tried(scenario: &Scenario, filled: Filled, outcome: &Outcome) -> Tried {
    let busiest = outcome.links.first().map(|link| (link.link.clone(), link.used));
    Tried {
        topology: scenario.topology,
        seeds: scenario.seeds,
        chunk: outcome.chunk,
        filled,
        failed: outcome.failed.len(),
        busiest,
    }
}

impl Trial<'_> {
    fn run(&mut self, scenario: Scenario) -> Result<Run, Error> {
        let outcome = simulate(self.profile, &scenario)?;
        let Some(filled) = outcome.filled() else {
            let why = outcome.failed.first().map_or("every one of them died", |(_, why)| why);
            return Err(Error::Lost { why: why.into() });
        };
        self.tried.push(tried(&scenario, filled, &outcome));
        Ok((scenario, filled, outcome))
    }

    /// The quickest shape with so many seeds, in its best chunk.
    fn best_shape(&mut self, seeds: u32) -> Result<Run, Error> {
        let clones = self.base.clones.div_ceil(seeds);
        let mut shapes = vec![Topology::Star];
        if clones > 1 {
            shapes.push(Topology::Chain);
        }
        for (length, fanout) in [(4, 1), (8, 1), (8, 2), (16, 1), (16, 2)] {
            if clones > 2 * length {
                shapes.push(Topology::Tree { length, fanout });
            }
        }
        if clones > 1 && u64::from(self.base.clones) * u64::from(self.base.ranks) <= PLACED {
            shapes.push(Topology::Placed);
        }
        let mut best: Option<Run> = None;
        for topology in shapes {
            let run = self.run(Scenario { topology, seeds, chunk: Chunk::Auto, ..self.base })?;
            best = Some(quicker(best, run));
        }
        let Some(mut best) = best else { return self.run(self.base) };
        let auto = best.2.chunk;
        for chunk in [auto / 4, auto / 2, auto * 2, auto * 4] {
            if chunk >= BLOCK && chunk.is_multiple_of(BLOCK) && chunk / 2 < self.base.image {
                let run = self.run(Scenario { chunk: Chunk::Bytes(chunk), ..best.0 })?;
                best = quicker(Some(best), run);
            }
        }
        Ok(best)
    }

    /// The numbers of seeds, each once.
    fn seeds_tried(&self) -> String {
        let numbers: BTreeSet<u32> = self.tried.iter().map(|t| t.seeds).collect();
        numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
    }

    fn why(&self, best: &Run, more: Option<&Run>, goal: Goal) -> Vec<String> {
        let (scenario, filled, outcome) = best;
        let mut why = Vec::new();
        if !outcome.failed.is_empty() {
            why.push(format!(
                "{} clones give up for want of a source: times are the others'",
                outcome.failed.len()
            ));
        }
        let same = |t: &&Tried| t.seeds == scenario.seeds;
        let kind = std::mem::discriminant(&scenario.topology);
        for other in [Topology::Star, Topology::Chain] {
            let found = self.tried.iter().filter(same).find(|t| t.topology == other);
            if let Some(t) = found.filter(|t| std::mem::discriminant(&t.topology) != kind) {
                let busiest = t.busiest.as_ref().map_or_else(String::new, |(link, used)| {
                    format!(": there {link} is used for {:.0} %", used * 100.0)
                });
                why.push(format!(
                    "{} and not {}: its last clone is ready after {}, a {}'s after {}{busiest}",
                    scenario.topology,
                    t.topology,
                    ms(filled.last_ms),
                    t.topology,
                    ms(t.filled.last_ms)
                ));
            }
        }
        if let Some(link) = outcome.links.first() {
            why.push(format!(
                "what bounds it: {} carries {} and is used for {:.0} % of the time",
                link.link,
                gigabytes(link.bytes),
                link.used * 100.0
            ));
        }
        let near = |t: &&Tried| {
            t.seeds == scenario.seeds && t.topology == scenario.topology && t.chunk != outcome.chunk
        };
        let mut chunks: Vec<_> = self.tried.iter().filter(near).collect();
        chunks.sort_by_key(|t| t.chunk);
        chunks.dedup_by_key(|t| t.chunk);
        if !chunks.is_empty() {
            let others: Vec<_> =
                chunks.iter().map(|t| format!("{} {}", ByteSize(t.chunk), ms(t.filled.last_ms))).collect();
            // What is said of smaller and larger ones is said where it was seen.
            let slower = |t: &&&Tried| t.filled.last_ms > filled.last_ms;
            let mut because = Vec::new();
            if chunks.iter().filter(slower).any(|t| t.chunk < outcome.chunk) {
                because.push("smaller ones pay a chunk's cost more often");
            }
            if chunks.iter().filter(slower).any(|t| t.chunk > outcome.chunk) {
                because.push("larger ones fill the pipeline later");
            }
            if because.is_empty() {
                because.push("as quick as any");
            }
            why.push(format!(
                "chunk {}: {}; {}",
                ByteSize(outcome.chunk),
                because.join(", "),
                others.join(", ")
            ));
        }
        match (more, goal.within_ms) {
            (Some((twice, f, _)), _) if f.last_ms >= filled.last_ms * (1.0 - SAME) => why.push(format!(
                "seeds: more bring nothing; with {} the last clone is ready after {}",
                twice.seeds,
                ms(f.last_ms)
            )),
            (Some((twice, f, _)), _) => why.push(format!(
                "seeds: {} would bring the last clone to {} ({:+.0} %)",
                twice.seeds,
                ms(f.last_ms),
                (f.last_ms / filled.last_ms - 1.0) * 100.0
            )),
            (None, Some(within)) if meets(best, within) => {
                why.push(format!("seeds: with {} it is done within {}", scenario.seeds, ms(within)));
            }
            (None, Some(within)) => why.push(format!(
                "no number of seeds that was tried ({}) brings the last clone below {}; this is the quickest found",
                self.seeds_tried(),
                ms(within)
            )),
            (None, None) => {}
        }
        why
    }
}

/// Whether every clone that lives has everything in `within` milliseconds.
fn meets((_, filled, outcome): &Run, within: f64) -> bool {
    outcome.failed.is_empty() && filled.last_ms <= within
}

/// The one with fewer clones that gave up, else the quicker of two; the one that was there where they are as quick.
fn quicker(there: Option<Run>, new: Run) -> Run {
    match there {
        Some(there) => {
            let slower = new.1.last_ms >= there.1.last_ms * (1.0 - SAME);
            let stays = match there.2.failed.len().cmp(&new.2.failed.len()) {
                Ordering::Less => true,
                Ordering::Equal => slower,
                Ordering::Greater => false,
            };
            if stays { there } else { new }
        }
        None => new,
    }
}

fn ms(ms: f64) -> String {
    if ms >= 1000.0 { format!("{:.2} s", ms / 1e3) } else { format!("{ms:.1} ms") }
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Goal = Goal { within_ms: None, most_seeds: 8 };

    #[test]
    fn one_clone_needs_no_chain_and_eight_do() {
        let profile = Profile::built_in("gb300").unwrap();
        let one = advise(&profile, &Scenario::new(40 << 30, 1), NOTHING).unwrap();
        assert_eq!(one.best.topology, Topology::Star);
        let eight = advise(&profile, &Scenario::new(40 << 30, 8), NOTHING).unwrap();
        assert_ne!(eight.best.topology, Topology::Star);
        assert!(eight.why.iter().any(|w| w.contains("and not star")), "{:?}", eight.why);
        assert!(eight.why.iter().any(|w| w.starts_with("chunk ")), "{:?}", eight.why);
        let quickest = eight.tried.iter().map(|t| t.filled.last_ms).fold(f64::INFINITY, f64::min);
        let one_seed = eight.tried.iter().filter(|t| t.seeds == 1).map(|t| t.filled.last_ms);
        let quickest_of_one = one_seed.fold(f64::INFINITY, f64::min);
        assert!(eight.best.filled.last_ms <= quickest_of_one * 1.0203, "{quickest}");
    }

    #[test]
    fn a_target_costs_seeds_and_one_that_cannot_be_is_said() {
        let profile = Profile::built_in("h100-roce").unwrap();
        let scenario = Scenario { per_host: Some(1), ..Scenario::new(4 << 30, 12) };
        let free = advise(&profile, &scenario, NOTHING).unwrap();
        assert_eq!(free.best.seeds, 1);
        // Half of what separates one seed from a bare copy.
        let bare = (4u64 << 30) as f64 / 48e9 * 1e3;
        let within = f64::midpoint(free.best.filled.last_ms, bare);
        let quick = advise(&profile, &scenario, Goal { within_ms: Some(within), most_seeds: 12 }).unwrap();
        assert_eq!(quick.meets, Some(true));
        assert!(quick.best.seeds > 1 && quick.best.filled.last_ms <= within);
        let never = advise(&profile, &scenario, Goal { within_ms: Some(1.0), most_seeds: 2 }).unwrap();
        assert_eq!(never.meets, Some(false));
        assert!(never.why.iter().any(|w| w.contains("that was tried (1, 2)")), "{:?}", never.why);
    }

    #[test]
    fn who_gave_up_counts_more_than_how_quick_the_others_are() {
        let profile = Profile::built_in("gb300").unwrap();
        let scenario = Scenario::new(1 << 30, 4);
        let outcome = simulate(&profile, &scenario).unwrap();
        let run = |last_ms: f64, failed: usize| {
            let filled = Filled { last_ms, ..outcome.filled().unwrap() };
            let failed = (0..).map(|clone| (clone, "no source".to_owned())).take(failed).collect();
            (scenario, filled, Outcome { failed, ..outcome.clone() })
        };
        assert_eq!(quicker(Some(run(9.0, 0)), run(1.0, 1)).1.last_ms, 9.0);
        assert_eq!(quicker(Some(run(1.0, 1)), run(9.0, 0)).1.last_ms, 9.0);
        assert_eq!(quicker(Some(run(9.0, 1)), run(1.0, 1)).1.last_ms, 1.0);
        assert!(meets(&run(1.0, 0), 2.0) && !meets(&run(1.0, 1), 2.0) && !meets(&run(3.0, 0), 2.0));
    }

    #[test]
    fn where_every_clone_dies_there_is_no_advice_but_no_defect_either() {
        let profile = Profile::built_in("gb300").unwrap();
        let doomed = Scenario { fail: 1.0, ..Scenario::new(1 << 30, 2) };
        let found = advise(&profile, &doomed, NOTHING).unwrap_err();
        assert_eq!(flashboot_core::Error::from(found).kind(), flashboot_core::Kind::SourceLost);
    }

    #[test]
    fn impossible_goals_are_refused() {
        let profile = Profile::built_in("gb300").unwrap();
        let scenario = Scenario::new(1 << 30, 2);
        for goal in [Goal { within_ms: Some(-1.0), ..NOTHING }, Goal { most_seeds: 0, ..NOTHING }] {
            assert!(matches!(advise(&profile, &scenario, goal), Err(Error::Range { .. })));
        }
    }
}
