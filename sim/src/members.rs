//! Who takes part, on which GPU, and whom each reads from at first.

use crate::{
    Error, Profile, Scenario, Topology,
    placement::Placement,
    site::{Port, Site},
};
use flashboot_core::{
    Geometry, PeerId, ShardId,
    replica::{Assignment, SourcedLeg},
    schedule::Gate,
};
use std::collections::BTreeSet;

/// One GPU that takes part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) gpu: u32,
    /// Which clone it is of, from 0; `None`: a seed's.
    pub(crate) clone: Option<u32>,
    /// Which of its replica's GPUs, and so which image.
    pub(crate) rank: u32,
    /// Which replica's it is, seeds counted too.
    pub(crate) replica: u32,
    /// Members of one group run one schedule; the first member of each is its rank 0.
    first: u32,
    /// Its number in the group's schedule.
    place: u32,
    /// Clones of the group.
    clones: u32,
}

/// Everybody, in parts that share nothing: no GPU, no port, and no image. Within its part a member's number is its peer id.
pub(crate) fn members(profile: &Profile, scenario: &Scenario) -> Result<Vec<Vec<Member>>, Error> {
    let seeds = if scenario.topology.is_gather() { 0 } else { scenario.seeds };
    let seats = Seats::new(profile, scenario, u64::from(seeds) + u64::from(scenario.clones))?;
    let mut parts: Vec<(BTreeSet<Port>, Vec<Member>)> = Vec::new();
    let site = Site::new(profile);
    for rank in 0..scenario.ranks {
        let mut of_rank = of_rank(scenario, seeds, rank, &seats);
        let mut ports: BTreeSet<Port> = of_rank.iter().flat_map(|m| site.around(m.gpu)).collect();
        // With everybody whose ports it shares.
        let mut apart = Vec::new();
        for (other, members) in parts {
            if other.is_disjoint(&ports) {
                apart.push((other, members));
                continue;
            }
            let first = number(members.len());
            of_rank.iter_mut().for_each(|member| member.first += first);
            of_rank.splice(0..0, members);
            ports.extend(other);
        }
        apart.push((ports, of_rank));
        parts = apart;
    }
    Ok(parts.into_iter().map(|(_, members)| members).collect())
}

/// The members of one image, group by group.
fn of_rank(scenario: &Scenario, seeds: u32, rank: u32, seats: &Seats) -> Vec<Member> {
    let Scenario { clones, topology, .. } = *scenario;
    let mut members = Vec::new();
    let (mut participant, mut clone) = (0, 0);
    // A group per seed; where the service places, or where nodes complete one another, all are one.
    let groups = if topology.is_gather() || topology == Topology::Placed { 1 } else { seeds };
    for group in 0..groups {
        let of_group = clones / groups + u32::from(group < clones % groups);
        let holders = if groups == 1 { seeds } else { 1 };
        let first = number(members.len());
        for place in 0..holders + of_group {
            let seed = place < holders;
            members.push(Member {
                gpu: seats.gpu(participant, rank),
                clone: (!seed).then_some(clone),
                rank,
                replica: participant,
                first,
                place,
                clones: of_group,
            });
            participant += 1;
            clone += u32::from(!seed);
        }
    }
    members
}

/// Members of a GPU that is shared, at most.
const SHARE: u64 = 64;

/// Which GPUs a replica has.
struct Seats {
    gpus: u64,
    gpus_per_host: u64,
    ranks: u64,
    per_host: Option<u64>,
}

impl Seats {
    fn new(profile: &Profile, scenario: &Scenario, replicas: u64) -> Result<Self, Error> {
        let seats = Self {
            gpus: profile.gpus(),
            gpus_per_host: u64::from(profile.shape.gpus_per_host),
            ranks: u64::from(scenario.ranks),
            per_host: scenario.per_host.map(u64::from),
        };
        if seats.per_host.is_some_and(|n| n * seats.ranks > seats.gpus_per_host) && !profile.shape.shared {
            return Err(Error::Range {
                option: "--per-host",
                given: scenario.per_host.unwrap_or_default().to_string(),
                possible: "as many replicas as a host has GPUs for",
            });
        }
        let wanted = seats.first(replicas.saturating_sub(1)).saturating_add(seats.ranks);
        if wanted > seats.gpus && !profile.shape.shared {
            return Err(Error::Room { profile: profile.name.clone(), wanted, has: seats.gpus });
        }
        let all = replicas.saturating_mul(seats.ranks);
        if profile.shape.shared && all > seats.gpus.saturating_mul(SHARE) {
            let possible = "at most 64 processes on each GPU of this profile, seeds' among them";
            return Err(Error::Range { option: "--clones", given: scenario.clones.to_string(), possible });
        }
        Ok(seats)
    }

    /// The first GPU of a participant.
    fn first(&self, participant: u64) -> u64 {
        match self.per_host {
            Some(n) => participant / n * self.gpus_per_host + participant % n * self.ranks,
            None => participant * self.ranks,
        }
    }

    fn gpu(&self, participant: u32, rank: u32) -> u32 {
        let gpu = self.first(u64::from(participant)) + u64::from(rank);
        u32::try_from(gpu % self.gpus.max(1)).unwrap_or(u32::MAX)
    }
}

fn number(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// What each member is to do, by the schedule or by the service; `None` for a seed, which holds all.
pub(crate) fn assignments(
    members: &[Member],
    scenario: &Scenario,
    geometry: Geometry,
    site: &Site<'_>,
) -> Result<Vec<Option<Assignment>>, Error> {
    if scenario.topology == Topology::Placed {
        return placed(members, geometry, site);
    }
    let one = |member: &Member| {
        member.clone?;
        let schedule = scenario.topology.schedule(member.clones)?;
        let mut assignment = Assignment::of(schedule, member.place, geometry);
        for leg in &mut assignment.legs {
            leg.source = PeerId(leg.source.0 + u64::from(member.first));
        }
        Some(assignment)
    };
    Ok(members.iter().map(one).collect())
}

/// As clones are placed that all wait for one another.
fn placed(members: &[Member], geometry: Geometry, site: &Site<'_>) -> Result<Vec<Option<Assignment>>, Error> {
    let mut placement = Placement::new(geometry.payload());
    for (id, member) in (0..).zip(members) {
        placement.comes(id, member, site.place(member.gpu), Some(member.clones))?;
    }
    let one = |(id, member): (u32, &Member)| {
        if member.clone.is_none() {
            return Ok(None);
        }
        let source = placement.source(id)?;
        let leg = SourcedLeg { source: PeerId(u64::from(source)), shard: ShardId(0) };
        Ok(Some(Assignment { geometry, held: Vec::new(), legs: vec![leg], gate: Gate::Chunk }))
    };
    (0..).zip(members).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(profile: &str, scenario: Scenario) -> Vec<u32> {
        let profile = Profile::built_in(profile).unwrap();
        members(&profile, &scenario).unwrap().concat().iter().map(|m| m.gpu).collect()
    }

    #[test]
    fn replicas_follow_one_another_or_keep_to_their_hosts() {
        let three = Scenario::new(1 << 30, 3);
        assert_eq!(gpus("gb300", three), [0, 1, 2, 3]);
        assert_eq!(gpus("gb300", Scenario { per_host: Some(1), ..three }), [0, 4, 8, 12]);
        assert_eq!(gpus("gb300", Scenario { ranks: 2, clones: 1, ..three }), [0, 2, 1, 3]);
        assert_eq!(gpus("h200x2", three), [0, 1, 0, 1], "members go around GPUs that are shared");
    }

    #[test]
    fn what_shares_nothing_is_apart_and_what_shares_a_port_is_together() {
        let parts = |profile: &str, scenario: Scenario| {
            members(&Profile::built_in(profile).unwrap(), &scenario).unwrap().len()
        };
        let replicas = Scenario { ranks: 4, ..Scenario::new(1 << 30, 3) };
        assert_eq!(parts("gb300", replicas), 4, "an image a GPU");
        assert_eq!(parts("h100-roce", Scenario { ranks: 8, ..replicas }), 8, "a device a GPU");
        assert_eq!(parts("racks8", replicas), 1, "racks have one uplink");
        assert_eq!(parts("h200", replicas), 1, "members share the GPU");
    }

    #[test]
    fn clones_are_dealt_out_to_seeds() {
        let profile = Profile::built_in("gb300").unwrap();
        let scenario = Scenario { seeds: 2, clones: 5, ..Scenario::new(1 << 30, 5) };
        let found = members(&profile, &scenario).unwrap().concat();
        let clones: Vec<_> = found.iter().map(|m| m.clone).collect();
        assert_eq!(clones, [None, Some(0), Some(1), Some(2), None, Some(3), Some(4)]);
        let site = Site::new(&profile);
        let geometry = scenario.geometry(&profile).unwrap();
        let all = assignments(&found, &scenario, geometry, &site).unwrap();
        let sources: Vec<_> =
            all.iter().map(|a| a.as_ref().and_then(|a| a.legs.first()).map(|l| l.source.0)).collect();
        assert_eq!(sources, [None, Some(0), Some(1), Some(2), None, Some(4), Some(5)]);
    }

    #[test]
    fn more_than_there_is_room_for_is_refused_with_numbers() {
        let profile = Profile::built_in("gb300").unwrap();
        let found = members(&profile, &Scenario::new(1, 72));
        assert_eq!(found, Err(Error::Room { profile: "gb300".into(), wanted: 73, has: 72 }));
        let h200 = Profile::built_in("h200").unwrap();
        let shared = members(&h200, &Scenario::new(1, 64));
        assert!(matches!(shared, Err(Error::Range { option: "--clones", .. })));
        assert!(members(&h200, &Scenario::new(1, 63)).is_ok());
        let crowded = Scenario { per_host: Some(5), ..Scenario::new(1, 2) };
        assert!(matches!(members(&profile, &crowded), Err(Error::Range { option: "--per-host", .. })));
    }

    #[test]
    fn the_service_places_each_reader_on_a_link_of_its_own() {
        let profile = Profile::built_in("h100-roce").unwrap();
        let scenario = Scenario { topology: Topology::Placed, ..Scenario::new(1 << 30, 23) };
        let found = members(&profile, &scenario).unwrap().concat();
        let site = Site::new(&profile);
        let all = assignments(&found, &scenario, scenario.geometry(&profile).unwrap(), &site).unwrap();
        let across = (0..).zip(&all).filter(|(id, a)| {
            a.as_ref().and_then(|a| a.legs.first()).is_some_and(|leg| leg.source.0 / 8 != id / 8)
        });
        assert_eq!(across.count(), 2, "of each further host one reads across: {all:?}");
    }
}
