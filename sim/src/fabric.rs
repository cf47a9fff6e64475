//! Links and what flows over them: every flow gets its fair share, and no link carries more than it can.
//!
//! A flow crosses some links and has a rate of its own that it never exceeds. Rates are max-min fair: all grow together until
//! a link is full; its flows stay, the others grow on. A flow is on its links from its first copy to its last, also
//! while it waits for its source. Links may come in pairs of opposite directions; while both carry something, each has
//! its `duplex` share of its rate.

/// A link's number.
pub(crate) type LinkId = u32;
/// A flow's number.
pub(crate) type FlowId = u32;

#[derive(Debug, Clone)]
struct Link {
    rate: f64,
    /// The opposite direction, and what is left while both carry something.
    opposite: Option<(LinkId, f64)>,
    /// Flows on it now.
    flows: Vec<FlowId>,
    seen: u64,
    /// While shares are dealt out: rate that is left, and flows without a share.
    left: f64,
    open: u32,
}

#[derive(Debug, Clone)]
struct Flow {
    links: Vec<LinkId>,
    limit: f64,
    rate: f64,
    on: bool,
    seen: u64,
    settled: bool,
}

/// All links and flows.
#[derive(Debug, Clone, Default)]
pub(crate) struct Fabric {
    links: Vec<Link>,
    flows: Vec<Flow>,
    /// Links on which a flow began or ended since the last [`settle`](Self::settle).
    touched: Vec<LinkId>,
    round: u64,
}

impl Fabric {
    /// A link of `rate` bytes a second.
    pub(crate) fn link(&mut self, rate: f64) -> LinkId {
        let id = u32::try_from(self.links.len()).unwrap_or(u32::MAX);
        self.links.push(Link { rate, opposite: None, flows: Vec::new(), seen: 0, left: 0.0, open: 0 });
        id
    }

    /// Makes two links the directions of one, of whose rates `duplex` is left while both carry something.
    pub(crate) fn pair(&mut self, a: LinkId, b: LinkId, duplex: f64) {
        for (link, other) in [(a, b), (b, a)] {
            if let Some(link) = self.links.get_mut(link as usize) {
                link.opposite = Some((other, duplex));
            }
        }
    }

    /// A flow over `links` that never exceeds `limit`; it carries nothing yet.
    pub(crate) fn flow(&mut self, links: Vec<LinkId>, limit: f64) -> FlowId {
        let id = u32::try_from(self.flows.len()).unwrap_or(u32::MAX);
        self.flows.push(Flow { links, limit, rate: 0.0, on: false, seen: 0, settled: true });
        id
    }

    /// Bytes a second of `flow` now; 0 until it has begun and [`settle`](Self::settle) was called.
    pub(crate) fn rate(&self, flow: FlowId) -> f64 {
        self.flows.get(flow as usize).map_or(0.0, |flow| flow.rate)
    }

    /// The most that `flow` ever has.
    pub(crate) fn limit(&self, flow: FlowId) -> f64 {
        self.flows.get(flow as usize).map_or(f64::INFINITY, |flow| flow.limit)
    }

    /// The links that `flow` crosses.
    pub(crate) fn links_of(&self, flow: FlowId) -> &[LinkId] {
        self.flows.get(flow as usize).map_or(&[], |flow| &flow.links)
    }

    /// The rate of `link` with nothing in the opposite direction.
    pub(crate) fn capacity(&self, link: LinkId) -> f64 {
        self.links.get(link as usize).map_or(0.0, |link| link.rate)
    }

    /// Begins `flow`.
    pub(crate) fn begin(&mut self, flow: FlowId) {
        let Some(f) = self.flows.get_mut(flow as usize) else { return };
        if f.on {
            return;
        }
        f.on = true;
        for link in &f.links {
            if let Some(l) = self.links.get_mut(*link as usize) {
                l.flows.push(flow);
            }
        }
        self.touched.extend_from_slice(&f.links);
    }

    /// Ends `flow`.
    pub(crate) fn end(&mut self, flow: FlowId) {
        let Some(f) = self.flows.get_mut(flow as usize) else { return };
        if !f.on {
            return;
        }
        (f.on, f.rate) = (false, 0.0);
        for link in &f.links {
            if let Some(l) = self.links.get_mut(*link as usize) {
                l.flows.retain(|other| *other != flow);
            }
        }
        self.touched.extend_from_slice(&f.links);
    }

    /// Whether shares are out of date.
    pub(crate) fn is_touched(&self) -> bool {
        !self.touched.is_empty()
    }

    /// What of its rate a link has now.
    fn duplex(&self, link: LinkId) -> f64 {
        let Some(l) = self.links.get(link as usize) else { return 1.0 };
        let Some((other, duplex)) = l.opposite else { return 1.0 };
        let busy = |l: &Link| !l.flows.is_empty();
        if busy(l) && self.links.get(other as usize).is_some_and(busy) { duplex } else { 1.0 }
    }

    /// Deals the shares out anew where something changed; gives the flows whose rate is another now.
    pub(crate) fn settle(&mut self) -> Vec<FlowId> {
        self.round += 1;
        let round = self.round;
        let mut around = std::mem::take(&mut self.touched);
        let opposite = |l: &LinkId| self.links.get(*l as usize)?.opposite.map(|(other, _)| other);
        let others: Vec<_> = around.iter().filter_map(opposite).collect();
        around.extend(others);
        // Everything that shares a link with something that shares a link with a change.
        let (mut links, mut flows) = (Vec::new(), Vec::new());
        while let Some(link) = around.pop() {
            let Some(l) = self.links.get_mut(link as usize) else { continue };
            if l.seen == round {
                continue;
            }
            l.seen = round;
            links.push(link);
            for flow in &l.flows {
                let Some(f) = self.flows.get_mut(*flow as usize) else { continue };
                if f.seen != round {
                    (f.seen, f.settled) = (round, false);
                    flows.push(*flow);
                    around.extend_from_slice(&f.links);
                }
            }
        }
        for link in &links {
            let duplex = self.duplex(*link);
            if let Some(l) = self.links.get_mut(*link as usize) {
                (l.left, l.open) = (l.rate * duplex, u32::try_from(l.flows.len()).unwrap_or(u32::MAX));
            }
        }
        self.share(&links, flows)
    }

    /// All of `flows` grow together, until their own limit or a full link stops them.
    fn share(&mut self, links: &[LinkId], flows: Vec<FlowId>) -> Vec<FlowId> {
        let limit = |fabric: &Self, flow: FlowId| {
            let Some(f) = fabric.flows.get(flow as usize) else { return 0.0 };
            f.limit * f.links.iter().map(|link| fabric.duplex(*link)).fold(1.0, f64::min)
        };
        let mut open: Vec<(FlowId, f64)> = flows.into_iter().map(|flow| (flow, limit(self, flow))).collect();
        let mut changed = Vec::new();
        while !open.is_empty() {
            let fair = |link: &LinkId| {
                let l = self.links.get(*link as usize)?;
                (l.open > 0).then(|| (l.left.max(0.0) / f64::from(l.open), *link))
            };
            let full = links.iter().filter_map(fair).min_by(|a, b| a.0.total_cmp(&b.0));
            let level = full.map_or(f64::INFINITY, |(level, _)| level);
            // Those that want less than that get what they want; where there are none, that link is full.
            let mut stop: Vec<_> = open.iter().copied().filter(|(_, limit)| *limit <= level).collect();
            if stop.is_empty() {
                let on = full.and_then(|(_, link)| self.links.get(link as usize));
                let on = on.map_or(&[][..], |l| &l.flows);
                let held = |flow: &&FlowId| self.flows.get(**flow as usize).is_some_and(|f| !f.settled);
                stop = on.iter().filter(held).map(|flow| (*flow, level)).collect();
            }
            if stop.is_empty() {
                break;
            }
            for (flow, rate) in stop {
                let Some(f) = self.flows.get_mut(flow as usize) else { continue };
                f.settled = true;
                if f.rate != rate {
                    f.rate = rate;
                    changed.push(flow);
                }
                for link in &f.links {
                    if let Some(l) = self.links.get_mut(*link as usize) {
                        l.left -= rate;
                        l.open = l.open.saturating_sub(1);
                    }
                }
            }
            open.retain(|(flow, _)| self.flows.get(*flow as usize).is_some_and(|f| !f.settled));
        }
        changed.sort_unstable();
        changed
    }

    /// Links that carry more than they can now, with what they carry and what they could: none, ever.
    #[cfg(test)]
    pub(crate) fn overfull(&self) -> Vec<(LinkId, f64, f64)> {
        let carried = |l: &Link| l.flows.iter().map(|f| self.rate(*f)).sum::<f64>();
        (0..)
            .zip(&self.links)
            .map(|(id, l)| (id, carried(l), l.rate * self.duplex(id)))
            .filter(|(_, carries, can)| *carries > can * (1.0 + 1e-9))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[track_caller]
    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() <= expected * 1e-9, "{found}, not {expected}");
    }

    #[test]
    fn readers_of_one_port_share_it_and_one_alone_has_its_own_limit() {
        let mut fabric = Fabric::default();
        let port = fabric.link(838.0);
        let flows: Vec<_> = (0..4).map(|_| fabric.flow(vec![port], 826.0)).collect();
        for (n, flow) in (1u32..).zip(&flows) {
            fabric.begin(*flow);
            assert_eq!(fabric.settle().len(), n as usize);
            near(fabric.rate(*flow), (838.0 / f64::from(n)).min(826.0));
        }
        fabric.end(flows[0]);
        fabric.settle();
        near(fabric.rate(flows[1]), 838.0 / 3.0);
        assert_eq!(fabric.rate(flows[0]), 0.0);
    }

    #[test]
    fn what_one_cannot_use_others_get() {
        let mut fabric = Fabric::default();
        let (shared, narrow) = (fabric.link(100.0), fabric.link(20.0));
        let held = fabric.flow(vec![shared, narrow], 1000.0);
        let free = fabric.flow(vec![shared], 1000.0);
        fabric.begin(held);
        fabric.begin(free);
        fabric.settle();
        near(fabric.rate(held), 20.0);
        near(fabric.rate(free), 80.0);
    }

    #[test]
    fn both_directions_at_once_have_their_share_of_each() {
        let mut fabric = Fabric::default();
        let (out, back) = (fabric.link(100.0), fabric.link(100.0));
        fabric.pair(out, back, 0.9);
        let (a, b) = (fabric.flow(vec![out], 100.0), fabric.flow(vec![back], 50.0));
        fabric.begin(a);
        fabric.settle();
        near(fabric.rate(a), 100.0);
        fabric.begin(b);
        assert_eq!(fabric.settle(), [a, b], "the flow in the other direction is told");
        near(fabric.rate(a), 90.0);
        near(fabric.rate(b), 45.0);
        fabric.end(b);
        assert_eq!(fabric.settle(), [a]);
        near(fabric.rate(a), 100.0);
    }

    proptest! {
        #[test]
        fn no_link_is_overfull_and_every_flow_is_held_by_something(
            rates in prop::collection::vec(1u32..1000, 1..8),
            flows in prop::collection::vec((prop::collection::btree_set(0usize..8, 1..4), 1u32..1000), 1..12),
            steps in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 1..40),
            duplex in 0.3f64..1.0,
        ) {
            let mut fabric = Fabric::default();
            let links: Vec<_> = rates.iter().map(|rate| fabric.link(f64::from(*rate))).collect();
            for pair in links.chunks_exact(2) {
                fabric.pair(pair[0], pair[1], duplex);
            }
            let flows: Vec<_> = flows.iter().map(|(over, limit)| {
                let mut over: Vec<_> = over.iter().map(|n| links[n % links.len()]).collect();
                over.dedup();
                over.sort_unstable();
                over.dedup();
                fabric.flow(over, f64::from(*limit))
            }).collect();
            for (which, on) in steps {
                let flow = *which.get(&flows);
                if on { fabric.begin(flow) } else { fabric.end(flow) }
                fabric.settle();
                prop_assert_eq!(fabric.overfull(), []);
                for flow in &flows {
                    let f = &fabric.flows[*flow as usize];
                    if !f.on { prop_assert_eq!(f.rate, 0.0); continue; }
                    let own = f.limit * f.links.iter().map(|l| fabric.duplex(*l)).fold(1.0, f64::min);
                    let full = |l: &LinkId| {
                        let carried: f64 = fabric.links[*l as usize].flows.iter().map(|f| fabric.rate(*f)).sum();
                        carried >= fabric.links[*l as usize].rate * fabric.duplex(*l) * (1.0 - 1e-9)
                    };
                    prop_assert!(f.rate > 0.0 && f.rate <= own * (1.0 + 1e-9));
                    prop_assert!(f.rate >= own * (1.0 - 1e-9) || f.links.iter().any(full), "{:?}", f);
                }
            }
            // Shares dealt out step by step are those that all at once would be, but for rounding.
            let mut fresh = fabric.clone();
            fresh.touched = links.clone();
            fresh.settle();
            for flow in flows {
                let (there, anew) = (fabric.rate(flow), fresh.rate(flow));
                prop_assert!((there - anew).abs() <= there * 1e-9, "{} {}", there, anew);
            }
        }
    }
}
