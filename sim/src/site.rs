//! Where GPUs are, and what a copy between two of them crosses.

use crate::{
    Copy, Error, Profile,
    fabric::{Fabric, FlowId, LinkId},
};
use flashboot_rendezvous::protocol::{Link, Place, crossed};
use std::collections::BTreeMap;

/// A port that a flow can cross.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Port {
    /// A GPU's own memory, for copies within it.
    Memory(u32),
    /// Out of a GPU over NVLink.
    Out(u32),
    /// Into a GPU over NVLink.
    In(u32),
    /// Out of a host by one of its network devices.
    Send(u32, u32),
    /// Into a host by one of its network devices.
    Receive(u32, u32),
    /// Out of a rack.
    Up(u32),
    /// Into a rack.
    Down(u32),
}

impl Port {
    /// Its name for people.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Memory(gpu) => format!("memory of GPU {gpu}"),
            Self::Out(gpu) => format!("egress of GPU {gpu}"),
            Self::In(gpu) => format!("ingress of GPU {gpu}"),
            Self::Send(host, rail) => format!("host {host}, device {rail}, sending"),
            Self::Receive(host, rail) => format!("host {host}, device {rail}, receiving"),
            Self::Up(rack) => format!("out of rack {rack}"),
            Self::Down(rack) => format!("into rack {rack}"),
        }
    }
}

/// The profile's GPUs, with those of their ports that something flows through.
#[derive(Debug)]
pub(crate) struct Site<'p> {
    profile: &'p Profile,
    ports: BTreeMap<Port, LinkId>,
}

impl<'p> Site<'p> {
    pub(crate) fn new(profile: &'p Profile) -> Self {
        Self { profile, ports: BTreeMap::new() }
    }

    /// Every port that a flow was made over, with its link.
    pub(crate) fn ports(&self) -> impl Iterator<Item = (Port, LinkId)> {
        self.ports.iter().map(|(port, link)| (*port, *link))
    }

    fn host(&self, gpu: u32) -> u32 {
        gpu / self.profile.shape.gpus_per_host.max(1)
    }

    fn rail(&self, gpu: u32) -> u32 {
        let rails = self.profile.network.as_ref().map_or(1, |network| network.rails);
        gpu % self.profile.shape.gpus_per_host.max(1) % rails.max(1)
    }

    fn rack(&self, gpu: u32) -> u32 {
        self.host(gpu) / self.profile.shape.hosts_per_rack.max(1)
    }

    /// What a member there would say of its place.
    pub(crate) fn place(&self, gpu: u32) -> Place {
        let host = self.host(gpu);
        Place {
            host: format!("host-{host}"),
            gpu: Some(format!("gpu-{gpu}")),
            nics: Vec::new(),
            domain: Some(format!("domain-{}", host / self.profile.shape.hosts_per_domain.max(1))),
            rail: self.profile.network.as_ref().map(|_| format!("rail-{}", self.rail(gpu))),
            rack: Some(format!("rack-{}", self.rack(gpu))),
        }
    }

    /// Every port by which something can get out of or into a GPU.
    pub(crate) fn around(&self, gpu: u32) -> Vec<Port> {
        let mut ports = vec![Port::Memory(gpu), Port::Out(gpu), Port::In(gpu)];
        if let Some(network) = &self.profile.network {
            let (host, rail, rack) = (self.host(gpu), self.rail(gpu), self.rack(gpu));
            ports.extend([Port::Send(host, rail), Port::Receive(host, rail)]);
            if network.uplink.is_some() {
                ports.extend([Port::Up(rack), Port::Down(rack)]);
            }
        }
        ports
    }

    /// The flow from `source` to `reader`, both by their GPU, and what copies over it cost. `factor` is what is left of its rate.
    pub(crate) fn connect(
        &mut self,
        fabric: &mut Fabric,
        source: u32,
        reader: u32,
        factor: f64,
    ) -> Result<(FlowId, &'p Copy), Error> {
        let profile = self.profile;
        let (name, copy, ports) = match crossed(&self.place(source), &self.place(reader)) {
            Link::Local => ("local", profile.local.as_ref(), vec![Port::Memory(source)]),
            Link::Nvlink => ("nvlink", profile.nvlink.as_ref(), vec![Port::Out(source), Port::In(reader)]),
            Link::Network => {
                let (from, to) = (self.host(source), self.host(reader));
                let mut ports =
                    vec![Port::Send(from, self.rail(source)), Port::Receive(to, self.rail(reader))];
                if self.rack(source) != self.rack(reader)
                    && profile.network.as_ref().is_some_and(|n| n.uplink.is_some())
                {
                    ports.extend([Port::Up(self.rack(source)), Port::Down(self.rack(reader))]);
                }
                ("network", profile.network.as_ref().map(|network| &network.copy), ports)
            }
        };
        let copy = copy.ok_or_else(|| Error::NoLink {
            profile: profile.name.clone(),
            link: name,
            reader,
            source_gpu: source,
        })?;
        let links = ports.into_iter().map(|port| self.port(fabric, port)).collect();
        Ok((fabric.flow(links, copy.rate * factor), copy))
    }

    fn port(&mut self, fabric: &mut Fabric, port: Port) -> LinkId {
        if let Some(link) = self.ports.get(&port) {
            return *link;
        }
        let Profile { gpu, local, network, .. } = self.profile;
        let (local, network) = (local.as_ref(), network.as_ref());
        let link = fabric.link(match port {
            Port::Memory(_) => local.map_or(gpu.egress, |copy| copy.rate),
            Port::Out(_) => gpu.egress,
            Port::In(_) => gpu.ingress,
            Port::Send(..) | Port::Receive(..) => network.map_or(f64::MAX, |network| network.rail),
            Port::Up(_) | Port::Down(_) => network.and_then(|network| network.uplink).unwrap_or(f64::MAX),
        });
        self.ports.insert(port, link);
        let opposite = match port {
            Port::Out(gpu) => Some(Port::In(gpu)),
            Port::In(gpu) => Some(Port::Out(gpu)),
            // Network devices and uplinks are full duplex.
            _ => None,
        };
        if let Some(other) = opposite.and_then(|port| self.ports.get(&port)) {
            fabric.pair(link, *other, gpu.duplex);
        }
        link
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crossed(profile: &str, source: u32, reader: u32) -> Vec<Port> {
        let profile = Profile::built_in(profile).unwrap();
        let mut site = Site::new(&profile);
        site.connect(&mut Fabric::default(), source, reader, 1.0).unwrap();
        site.ports().map(|(port, _)| port).collect()
    }

    #[test]
    fn a_copy_crosses_what_lies_between() {
        assert_eq!(crossed("h200", 0, 0), [Port::Memory(0)]);
        assert_eq!(crossed("gb300", 0, 71), [Port::Out(0), Port::In(71)]);
        assert_eq!(crossed("h100-roce", 1, 7), [Port::Out(1), Port::In(7)]);
        assert_eq!(crossed("h100-roce", 1, 9), [Port::Send(0, 1), Port::Receive(1, 1)]);
        assert_eq!(
            crossed("racks8", 1, 73),
            [Port::Send(0, 1), Port::Receive(18, 1), Port::Up(0), Port::Down(1)]
        );
    }

    #[test]
    fn a_link_that_the_profile_lacks_is_named() {
        let profile = Profile { nvlink: None, ..Profile::built_in("gb300").unwrap() };
        let found = Site::new(&profile).connect(&mut Fabric::default(), 3, 4, 1.0);
        let wanted = Error::NoLink { profile: "gb300".into(), link: "nvlink", reader: 4, source_gpu: 3 };
        assert_eq!(found.unwrap_err(), wanted);
    }
}
