//! Which experts are in which expert-parallel group.

use super::Refused;
use crate::source::Source;
use std::collections::BTreeMap;
use std::path::Path;

/// Far above any map: a hundred layers of a thousand experts each.
const CAP: u64 = 64 << 20;

/// Where routed experts live. An expert in several groups is redundant: each of them holds all of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ExpertMap {
    /// Runs of consecutive numbers; where they do not divide, the first groups have one more.
    #[default]
    Contiguous,
    /// Number modulo groups.
    RoundRobin,
    /// Group by group the experts in it, in the order of its slots.
    Explicit {
        /// For layers without a map of their own.
        groups: Vec<Vec<u32>>,
        /// For single layers.
        layers: BTreeMap<u64, Vec<Vec<u32>>>,
    },
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    groups: Vec<Vec<u32>>,
    #[serde(default)]
    layers: BTreeMap<u64, Vec<Vec<u32>>>,
}

impl ExpertMap {
    /// Reads `{"groups": [[0, 1], [2, 3, 0]], "layers": {"7": [[…], […]]}}`; either member may be left out.
    pub fn parse(json: &[u8]) -> Result<Self, Refused> {
        let file: File = serde_json::from_slice(json)
            .map_err(|e| Refused::ExpertMap { problem: format!("is not readable: {e}") })?;
        Ok(Self::Explicit { groups: file.groups, layers: file.layers })
    }

    /// Reads the map in a file.
    pub fn read(path: &Path) -> crate::Result<Self> {
        Ok(Self::parse(&Source::open(path)?.all(CAP)?)?)
    }

    /// Its name in a layout's.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Contiguous => "contiguous".into(),
            Self::RoundRobin => "round-robin".into(),
            Self::Explicit { groups, layers } => {
                let text = format!("{groups:?} {layers:?}");
                let hash = blake3::hash(text.as_bytes()).to_hex();
                format!("map-{}", hash.get(..16).unwrap_or_default())
            }
        }
    }

    /// Whether layers differ.
    pub(crate) fn by_layer(&self) -> bool {
        matches!(self, Self::Explicit { layers, .. } if !layers.is_empty())
    }

    /// The experts of `group` in slot order, `experts` spread over `groups`.
    pub(crate) fn of_group(&self, layer: u64, group: u32, groups: u32, experts: u64) -> Vec<u64> {
        let (g, n) = (u64::from(group), u64::from(groups.max(1)));
        match self {
            Self::Contiguous => {
                let (base, more) = (experts / n, experts % n);
                let start = g * base + g.min(more);
                (start..start + base + u64::from(g < more)).collect()
            }
            Self::RoundRobin => (0..experts).filter(|e| e % n == g).collect(),
            Self::Explicit { groups, layers } => {
                let map = layers.get(&layer).unwrap_or(groups);
                map.get(group as usize).into_iter().flatten().map(|&e| u64::from(e)).collect()
            }
        }
    }

    /// Checks it against the model: every expert somewhere, none that is not there, none twice in one group.
    pub(crate) fn check(&self, groups: u32, experts: u64, layer_numbers: &[u64]) -> Result<(), Refused> {
        let Self::Explicit { layers, .. } = self else { return Ok(()) };
        let refuse = |problem: String| Err(Refused::ExpertMap { problem });
        if let Some(unknown) = layers.keys().find(|layer| !layer_numbers.contains(layer)) {
            return refuse(format!("is about layer {unknown}, which has no experts"));
        }
        for &layer in layer_numbers {
            let map = self.groups_of(layer);
            if map.len() != groups as usize {
                return refuse(format!("has {} groups for layer {layer}, {groups} are needed", map.len()));
            }
            let mut seen = vec![false; usize::try_from(experts).unwrap_or(0)];
            for (number, group) in map.iter().enumerate() {
                let mut here = std::collections::HashSet::new();
                for &expert in group {
                    let Some(slot) = seen.get_mut(expert as usize) else {
                        return refuse(format!("names expert {expert} of {experts}"));
                    };
                    *slot = true;
                    if !here.insert(expert) {
                        return refuse(format!("has expert {expert} twice in group {number}"));
                    }
                }
            }
            if let Some(missing) = seen.iter().position(|seen| !seen) {
                return refuse(format!("leaves out expert {missing} in layer {layer}"));
            }
        }
        Ok(())
    }

    fn groups_of(&self, layer: u64) -> &[Vec<u32>] {
        match self {
            Self::Explicit { groups, layers } => layers.get(&layer).unwrap_or(groups),
            _ => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_expert_is_in_exactly_one_group(experts in 0u64..40, groups in 1u32..9) {
            for map in [ExpertMap::Contiguous, ExpertMap::RoundRobin] {
                let mut all: Vec<_> = (0..groups).flat_map(|g| map.of_group(0, g, groups, experts)).collect();
                all.sort_unstable();
                prop_assert_eq!(all, (0..experts).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn uneven_counts_are_the_engines() {
        let group = |map: &ExpertMap, g| map.of_group(0, g, 4, 10);
        assert_eq!(group(&ExpertMap::Contiguous, 0), [0, 1, 2]);
        assert_eq!(group(&ExpertMap::Contiguous, 2), [6, 7]);
        assert_eq!(group(&ExpertMap::RoundRobin, 1), [1, 5, 9]);
    }

    #[test]
    fn a_map_is_held_against_the_model() {
        let map = |json: &str| ExpertMap::parse(json.as_bytes());
        let good = map(r#"{"groups": [[0, 1, 2], [2, 3, 0]], "layers": {"1": [[3, 2], [1, 0]]}}"#).unwrap();
        good.check(2, 4, &[0, 1]).unwrap();
        assert_eq!(good.of_group(0, 1, 2, 4), [2, 3, 0]);
        assert_eq!(good.of_group(1, 0, 2, 4), [3, 2]);
        let problem = |json: &str| map(json).and_then(|m| m.check(2, 4, &[0])).unwrap_err().to_string();
        assert!(problem(r#"{"groups": [[0, 1], [2]]}"#).contains("leaves out expert 3"));
        assert!(problem(r#"{"groups": [[0, 1], [2, 4]]}"#).contains("expert 4 of 4"));
        assert!(problem(r#"{"groups": [[0, 1, 1], [2, 3]]}"#).contains("twice in group 0"));
        assert!(problem(r#"{"groups": [[0, 1, 2, 3]]}"#).contains("has 1 groups"));
        assert!(problem(r#"{"groups": [[0, 1], [2, 3]], "layers": {"9": []}}"#).contains("layer 9"));
        assert!(problem(r#"{"grups": []}"#).contains("grups"));
    }
}
