//! What a machine is like, as data: a TOML file, built in or the user's own.

use crate::{Curve, Error};
use serde::Deserialize;

const BUILT_IN: [(&str, &str); 5] = [
    ("gb300", include_str!("../profiles/gb300.toml")),
    ("h200", include_str!("../profiles/h200.toml")),
    ("h200x2", include_str!("../profiles/h200x2.toml")),
    ("h100-roce", include_str!("../profiles/h100-roce.toml")),
    ("racks8", include_str!("../profiles/racks8.toml")),
];

/// A modelled machine. Rates are bytes a second, costs microseconds.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Its name.
    pub name: String,
    /// What it is, in a sentence.
    pub about: String,
    /// Which measurement its predictions were held against, and in which range; `None`: none, and whoever prints a result says so.
    /// Only a built-in profile has one.
    #[serde(default)]
    pub validated: Option<String>,
    /// How many of what there are.
    pub shape: Shape,
    /// What every GPU can do, whoever reads.
    pub gpu: Gpu,
    /// Between two processes of one GPU.
    #[serde(default)]
    pub local: Option<Copy>,
    /// Between GPUs of one NVLink domain.
    #[serde(default)]
    pub nvlink: Option<Copy>,
    /// Between hosts without a common NVLink domain.
    #[serde(default)]
    pub network: Option<Network>,
    /// From disk and host memory into a GPU.
    #[serde(default)]
    pub memory: Option<Memory>,
    /// Asking the replication service.
    #[serde(default)]
    pub service: Asking,
}

/// How many GPUs, and what they share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// GPUs of a host.
    pub gpus_per_host: u32,
    /// Hosts in all.
    pub hosts: u32,
    /// Hosts of one NVLink domain; 1: each host is one.
    pub hosts_per_domain: u32,
    /// Hosts of a rack.
    pub hosts_per_rack: u32,
    /// Several members may share a GPU: they go around the GPUs.
    #[serde(default)]
    pub shared: bool,
}

/// A GPU's own limits.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// The most that all readers of a GPU get together.
    pub egress: f64,
    /// The most that a GPU takes in.
    pub ingress: f64,
    /// What is left of a link's rate at a GPU that sends and receives at once: above 0, at most 1.
    pub duplex: f64,
    /// How fast a GPU hashes what has landed; `None`: clones cannot verify.
    #[serde(default)]
    pub hash: Option<f64>,
    /// Processes of one GPU take turns; `None`: they copy at once.
    #[serde(default)]
    pub turns: Option<Turns>,
}

/// How processes take turns on a GPU that they share: round and round, each for a slice, or for less where it has nothing
/// more to do. A copy that the slice's end interrupts goes on in the next one.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Turns {
    /// The longest turn while others have something to do.
    pub slice_us: f64,
    /// From one process's last byte to the next one's first. A clone that is done is passed at the same cost.
    pub change_us: f64,
    /// From a copy's end on the GPU to its host's knowing.
    pub notice_us: f64,
    /// A host asks all the time for a copy's end, until the copy has waited this long for its turn, or six times what it takes alone;
    pub patience_us: f64,
    /// then it knows this much later.
    pub late_us: f64,
}

/// What one copy over a link costs.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Copy {
    /// One copy alone.
    pub rate: f64,
    /// From asking for a copy to its first byte; runs beside the copy before it.
    pub start_us: f64,
    /// Per chunk, in the link's own time: nothing hides it.
    pub chunk_us: f64,
    /// Standard deviation of `chunk_us`.
    #[serde(default)]
    pub jitter_us: f64,
    /// Rates of copies by their size, where `chunk_us` does not describe them; both together add up.
    #[serde(default)]
    pub curve: Option<Curve>,
    /// From a source's publishing to a waiting reader's knowing.
    pub look_us: f64,
    /// Importing and mapping a source's memory.
    pub map_ms: f64,
    /// From a source's death to its readers' knowing.
    pub detect_ms: f64,
}

/// A network of hosts.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// What a copy costs, `rate` for one connection.
    pub copy: Copy,
    /// Network devices of a host; GPU g uses device g mod that.
    pub rails: u32,
    /// Each direction of one device.
    pub rail: f64,
    /// Each direction of a rack's uplinks together; `None`: they never limit.
    #[serde(default)]
    pub uplink: Option<f64>,
}

/// What asking the replication service takes.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asking {
    /// A question and its answer.
    pub question_ms: f64,
    /// For how long a member that is told to wait asks again before it gives up.
    pub patience_ms: f64,
}

impl Default for Asking {
    fn default() -> Self {
        Self { question_ms: 1.0, patience_ms: 10_000.0 }
    }
}

/// The way from disk into a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// Sockets of a host; its GPUs are dealt out to them.
    pub sockets: u32,
    /// One socket's memory; also how fast a socket registers (pins) memory, where `pin` does not say.
    pub socket: f64,
    /// How fast memory is registered for one GPU; `None`: as fast as its socket's memory allows.
    #[serde(default)]
    pub pin: Option<f64>,
    /// Host to device, of one GPU.
    pub h2d: f64,
    /// A host's disks; `None`: not known.
    #[serde(default)]
    pub disk: Option<f64>,
}

impl Profile {
    /// Names of the built-in profiles.
    pub fn names() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|(name, _)| *name)
    }

    /// The built-in profile of this name.
    ///
    /// # Errors
    /// [`Error::UnknownProfile`] where there is none.
    pub fn built_in(name: &str) -> Result<Self, Error> {
        match BUILT_IN.iter().find(|(n, _)| *n == name) {
            Some((name, text)) => Self::read(name, text),
            None => Err(Error::UnknownProfile {
                name: name.into(),
                known: Self::names().collect::<Vec<_>>().join(", "),
            }),
        }
    }

    /// Reads a profile of one's own; `name` is for errors. Whatever its text says, it was held against no measurement of ours: it is
    /// unvalidated.
    ///
    /// # Errors
    /// [`Error::Profile`] for a text that is none, or with numbers that cannot be.
    pub fn parse(name: &str, text: &str) -> Result<Self, Error> {
        Ok(Self { validated: None, ..Self::read(name, text)? })
    }

    fn read(name: &str, text: &str) -> Result<Self, Error> {
        let wrong = |detail: String| Error::Profile { name: name.into(), detail };
        let profile: Self = toml::from_str(text).map_err(|e| wrong(e.to_string().trim_end().to_owned()))?;
        profile.check().map_err(wrong)?;
        Ok(profile)
    }

    /// All GPUs.
    pub fn gpus(&self) -> u64 {
        u64::from(self.shape.gpus_per_host) * u64::from(self.shape.hosts)
    }

    fn check(&self) -> Result<(), String> {
        let Shape { gpus_per_host, hosts, hosts_per_domain, hosts_per_rack, .. } = self.shape;
        for (what, n) in [
            ("shape.gpus_per_host", gpus_per_host),
            ("shape.hosts", hosts),
            ("shape.hosts_per_domain", hosts_per_domain),
            ("shape.hosts_per_rack", hosts_per_rack),
        ] {
            if n == 0 || n > 1 << 20 {
                return Err(format!("{what} is {n}: between 1 and {} are possible", 1 << 20));
            }
        }
        if self.gpus() > 1 << 24 {
            return Err(format!("{} GPUs are more than {}", self.gpus(), 1 << 24));
        }
        rate("gpu.egress", self.gpu.egress)?;
        rate("gpu.ingress", self.gpu.ingress)?;
        optional("gpu.hash", self.gpu.hash)?;
        if !(self.gpu.duplex > 0.0 && self.gpu.duplex <= 1.0) {
            return Err(format!("gpu.duplex is {}: above 0 and at most 1 are possible", self.gpu.duplex));
        }
        if let Some(turns) = self.gpu.turns {
            turns.check()?;
        }
        for (name, copy) in [("local", &self.local), ("nvlink", &self.nvlink)] {
            copy.as_ref().map_or(Ok(()), |copy| copy.check(name))?;
        }
        if let Some(network) = &self.network {
            network.copy.check("network.copy")?;
            rate("network.rail", network.rail)?;
            optional("network.uplink", network.uplink)?;
            if network.rails == 0 || network.rails > 1024 {
                return Err(format!("network.rails is {}: between 1 and 1024 are possible", network.rails));
            }
        }
        cost("service.question_ms", self.service.question_ms)?;
        cost("service.patience_ms", self.service.patience_ms)?;
        if let Some(memory) = self.memory {
            rate("memory.socket", memory.socket)?;
            rate("memory.h2d", memory.h2d)?;
            optional("memory.pin", memory.pin)?;
            optional("memory.disk", memory.disk)?;
            if memory.sockets == 0 || memory.sockets > gpus_per_host {
                return Err(format!("memory.sockets is {}: between 1 and one a GPU", memory.sockets));
            }
        }
        Ok(())
    }
}

impl Turns {
    fn check(&self) -> Result<(), String> {
        if self.slice_us < 1.0 {
            return Err(format!("gpu.turns.slice_us is {}: from 1 to 1e7 are possible", self.slice_us));
        }
        for (what, value) in [
            ("slice_us", self.slice_us),
            ("change_us", self.change_us),
            ("notice_us", self.notice_us),
            ("patience_us", self.patience_us),
            ("late_us", self.late_us),
        ] {
            cost(&format!("gpu.turns.{what}"), value)?;
        }
        Ok(())
    }
}

impl Copy {
    fn check(&self, of: &str) -> Result<(), String> {
        rate(&format!("{of}.rate"), self.rate)?;
        for (what, value) in [
            ("start_us", self.start_us),
            ("chunk_us", self.chunk_us),
            ("jitter_us", self.jitter_us),
            ("look_us", self.look_us),
            ("map_ms", self.map_ms),
            ("detect_ms", self.detect_ms),
        ] {
            cost(&format!("{of}.{what}"), value)?;
        }
        if let Some(curve) = &self.curve {
            curve.check(of, self.rate)?;
        }
        if self.jitter_us > 0.0 && self.chunk_us == 0.0 {
            return Err(format!(
                "{of}.jitter_us is {}: a cost of nothing ({of}.chunk_us) cannot vary",
                self.jitter_us
            ));
        }
        Ok(())
    }
}

fn rate(what: &str, value: f64) -> Result<(), String> {
    if (1e3..=1e18).contains(&value) {
        return Ok(());
    }
    Err(format!("{what} is {value}: rates are bytes a second, from 1e3 to 1e18"))
}

fn optional(what: &str, value: Option<f64>) -> Result<(), String> {
    value.map_or(Ok(()), |value| rate(what, value))
}

fn cost(what: &str, value: f64) -> Result<(), String> {
    if (0.0..=1e7).contains(&value) {
        return Ok(());
    }
    Err(format!("{what} is {value}: from 0 to 1e7 are possible"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_built_in_profile_reads_and_bears_its_name() {
        for name in Profile::names() {
            assert_eq!(Profile::built_in(name).unwrap().name, name);
        }
        assert!(matches!(Profile::built_in("b200"), Err(Error::UnknownProfile { .. })));
    }

    #[test]
    fn a_text_of_ones_own_is_validated_against_nothing() {
        let (name, text) = BUILT_IN[0];
        assert!(Profile::built_in(name).unwrap().validated.is_some() && text.contains("validated = "));
        assert_eq!(Profile::parse("mine.toml", text).unwrap().validated, None);
    }

    #[test]
    fn impossible_numbers_and_unknown_keys_are_refused_by_name() {
        let (_, good) = BUILT_IN[0];
        for (is, becomes, named) in [
            ("duplex = 0", "duplex = 7", "gpu.duplex"),
            ("egress = 8", "egress = -8", "gpu.egress"),
            ("duplex = 0", "x = 1\nduplex = 0", "x"),
            ("hosts = 18", "hosts = 0", "shape.hosts"),
            ("start_us = ", "start_us = -", "nvlink.start_us"),
            ("chunk_us = 6.71", "chunk_us = 0.0", "nvlink.jitter_us"),
            ("sockets = 2", "sockets = 9", "memory.sockets"),
            ("look_us = 8.5", "look_us = 8.5\ncurve = [[1, 1e9], [1, 2e9]]", "nvlink.curve"),
        ] {
            assert!(good.contains(is), "{is}");
            let text = good.replacen(is, becomes, 1);
            let Err(Error::Profile { detail, .. }) = Profile::parse("x", &text) else {
                panic!("{becomes} was taken");
            };
            assert!(detail.contains(named), "{detail}");
        }
        for key in ["slice_us", "change_us", "notice_us", "patience_us", "late_us"] {
            let (_, good) = BUILT_IN[1];
            let text = good.replacen(&format!("{key} = "), &format!("{key} = -"), 1);
            let Err(Error::Profile { detail, .. }) = Profile::parse("x", &text) else {
                panic!("a negative {key} was taken");
            };
            assert!(detail.contains(&format!("gpu.turns.{key}")), "{detail}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".{0,200}") {
            let _ = Profile::parse("x", &text);
        }
    }
}
