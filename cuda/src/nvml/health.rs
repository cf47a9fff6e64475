//! A fabric's health, as `NVML_GPU_FABRIC_HEALTH_…` encodes it: fields of a mask, and a summary where the library is new
//! enough. Each field says yes, no, or that it does not know.

use std::fmt;

/// What a GPU's NVLink fabric is good for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Health {
    /// Nothing is told: an older NVML, or no fabric.
    Unknown,
    /// Nothing is wrong in what is told.
    Good,
    /// Something is, in words.
    Degraded(Vec<String>),
}

/// Fields of two bits: where each begins, and what its being set means.
const CONDITIONS: [(u32, &str); 4] = [
    (0, "degraded bandwidth"),
    (2, "a route is being recovered"),
    (4, "a route is unhealthy"),
    (6, "an access timeout is being recovered from"),
];
const NOT_TOLD: u32 = 0;
const YES: u32 = 1;

/// The field of four bits at this bit: what is wrong with the configuration, from its second value on.
const CONFIGURATION: u32 = 8;
const MISCONFIGURED: [&str; 7] = [
    "a wrong system GUID",
    "a wrong chassis serial number",
    "no partition",
    "too few NVLinks",
    "GPU firmware that does not fit",
    "a wrong location",
    "an invalid state of the GPU",
];
const CONFIGURED: u32 = 1;

/// Summaries.
const UNHEALTHY: u8 = 2;
const LIMITED_CAPACITY: u8 = 3;

impl Health {
    pub(super) fn read(mask: u32, summary: u8) -> Self {
        let condition = |at: u32| (mask >> at) & 0x3;
        let mut wrong: Vec<String> = CONDITIONS
            .iter()
            .filter(|(at, _)| condition(*at) == YES)
            .map(|(_, words)| (*words).to_owned())
            .collect();
        let configuration = (mask >> CONFIGURATION) & 0xf;
        if configuration > CONFIGURED {
            let named = MISCONFIGURED.get((configuration - CONFIGURED - 1) as usize);
            wrong.push(match named {
                Some(words) => format!("the configuration has {words}"),
                None => format!("the configuration is wrong (NVML's number {configuration})"),
            });
        }
        if wrong.is_empty() {
            match summary {
                UNHEALTHY => wrong.push("unhealthy, without a reason".to_owned()),
                LIMITED_CAPACITY => wrong.push("limited capacity, without a reason".to_owned()),
                _ => {}
            }
        }
        let told = CONDITIONS.iter().any(|(at, _)| condition(*at) != NOT_TOLD) || configuration != NOT_TOLD;
        match wrong.is_empty() {
            false => Self::Degraded(wrong),
            true if told || summary != 0 => Self::Good,
            true => Self::Unknown,
        }
    }
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("not told by this machine's NVML"),
            Self::Good => f.write_str("healthy"),
            Self::Degraded(wrong) => write!(f, "degraded: {}", wrong.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Every condition told and false, the configuration right.
    const ALL_WELL: u32 = 0x1aa;

    #[test]
    fn what_is_told_and_false_is_good_and_what_is_not_told_unknown() {
        assert_eq!(Health::read(0, 0), Health::Unknown);
        assert_eq!(Health::read(ALL_WELL, 0), Health::Good);
        assert_eq!(Health::read(0, 1), Health::Good);
        assert_eq!(Health::read(0x2, 0), Health::Good, "an older library tells of the bandwidth only");
        assert_eq!(Health::read(0, 0).to_string(), "not told by this machine's NVML");
    }

    #[test]
    fn each_condition_is_named() {
        let told = |mask| Health::read(mask, 0).to_string();
        assert_eq!(told(0x1), "degraded: degraded bandwidth");
        assert_eq!(told(ALL_WELL ^ 0xc), "degraded: a route is being recovered");
        assert_eq!(told(ALL_WELL ^ 0x30), "degraded: a route is unhealthy");
        assert_eq!(told(ALL_WELL ^ 0xc0), "degraded: an access timeout is being recovered from");
        assert_eq!(told(0x2aa), "degraded: the configuration has a wrong system GUID");
        assert_eq!(told(0x5aa), "degraded: the configuration has too few NVLinks");
        assert_eq!(told(0xfaa), "degraded: the configuration is wrong (NVML's number 15)");
        assert_eq!(
            told(0x411),
            "degraded: degraded bandwidth, a route is unhealthy, the configuration has no partition"
        );
        assert_eq!(Health::read(ALL_WELL, 3).to_string(), "degraded: limited capacity, without a reason");
    }

    proptest! {
        #[test]
        fn no_mask_is_good_that_has_a_condition(mask: u32, summary: u8, at in 0_usize..4) {
            let set = (mask & !(0x3 << (2 * at))) | (1 << (2 * at));
            prop_assert!(matches!(Health::read(set, summary), Health::Degraded(_)));
        }
    }
}
