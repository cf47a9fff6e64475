//! `flashboot status`: who holds what, and who reads from whom, drawn.

use super::Protection;
use crate::{
    exit::{Code, Failure},
    human,
    output::Output,
    settings::Overrides,
    verbs::replicate::runtime,
};
use clap::Args;
use flashboot::{config::Config, service};
use flashboot_rendezvous::{
    protocol::{Blame, Bound, Egress, MemberStatus, Role, Status},
    store::Address,
};
use std::{collections::BTreeSet, fmt::Write as _};

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// The replication service: what `flashboot rendezvous` or `flashboot seed` printed, etcd://… or dir:PATH
    #[arg(long, value_name = "ADDRESS")]
    rendezvous: Address,
    #[command(flatten)]
    protection: Protection,
}

impl StatusArgs {
    pub(in crate::verbs) fn overrides(&self, into: &mut Overrides) {
        self.protection.overrides(into);
    }
}

pub(crate) fn run(args: &StatusArgs, config: &Config, output: Output) -> Result<Code, Failure> {
    let runtime = runtime(false)?;
    let network = config.network();
    let status = runtime.block_on(async { service::status(&args.rendezvous, &network).await })?;
    output.result(&status, || text(&status))?;
    Ok(Code::SUCCESS)
}

/// Each content, and under it its members as trees: who reads stands below whom it reads from.
fn text(status: &Status) -> String {
    let mut text = String::new();
    if status.members.is_empty() {
        return "nobody is registered\n".into();
    }
    for (number, content) in status.contents.iter().enumerate() {
        let members: Vec<_> = status.members.iter().filter(|m| m.content == number).collect();
        let revision =
            if content.revision.is_empty() { String::new() } else { format!(" {}", content.revision) };
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{}{revision} {} of {}, {}\nimage {}",
            content.model,
            content.rank,
            human::bytes(content.bytes),
            human::count(members.len() as u64, "member"),
            content.image
        );
        let present: BTreeSet<_> = members.iter().map(|m| m.member).collect();
        let mut drawn = BTreeSet::new();
        let roots = members.iter().filter(|m| m.upstream.is_none_or(|up| !present.contains(&up)));
        for root in roots {
            draw(&mut text, &members, root, content.bytes, "", "", &mut drawn);
        }
        // Whoever no root reaches is drawn all the same.
        for member in &members {
            if !drawn.contains(&member.member) {
                draw(&mut text, &members, member, content.bytes, "", "", &mut drawn);
            }
        }
        text.push('\n');
    }
    text
}

fn draw(
    text: &mut String,
    members: &[&MemberStatus],
    member: &MemberStatus,
    bytes: u64,
    first: &str,
    rest: &str,
    drawn: &mut BTreeSet<flashboot_rendezvous::protocol::MemberId>,
) {
    if !drawn.insert(member.member) {
        return;
    }
    let _ = writeln!(text, "{first}{}", line(member, bytes));
    let below: Vec<_> = members.iter().filter(|m| m.upstream == Some(member.member)).collect();
    for (i, reader) in below.iter().enumerate() {
        let (branch, trunk) = if i + 1 == below.len() { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        draw(text, members, reader, bytes, &format!("{rest}{branch}"), &format!("{rest}{trunk}"), drawn);
    }
}

/// By what it sends, and who keeps to a bound on it.
fn egress(by: &[Egress]) -> String {
    let one = |egress: &Egress| match (egress.bound, egress.bytes_per_s) {
        (Bound::Enforced, Some(rate)) => {
            format!("{} (enforced, {})", egress.transport, human::rate(rate as f64))
        }
        (Bound::Enforced, None) => format!("{} (enforced)", egress.transport),
        (Bound::Cooperative, _) => format!("{} (cooperative)", egress.transport),
    };
    by.iter().map(one).collect::<Vec<_>>().join(" ")
}

fn line(m: &MemberStatus, bytes: u64) -> String {
    let role = if m.role == Role::Seed { "seed" } else { "clone" };
    let name = m.name.as_ref().map_or_else(String::new, |name| format!(" {name}"));
    let percent = if bytes == 0 { 100 } else { u128::from(m.holds) * 100 / u128::from(bytes) };
    let rate = if m.bytes_per_s > 0 && m.holds < bytes {
        format!(" at {}", human::rate(m.bytes_per_s as f64))
    } else {
        String::new()
    };
    let memory = m
        .place
        .gpu
        .as_ref()
        .map_or_else(|| "host memory".to_owned(), |gpu| gpu.chars().take(12).collect::<String>());
    let host: String = m.place.host.chars().take(8).collect();
    let upstream = match m.upstream {
        Some(_) => "",
        None if m.holds < bytes => ", waits for a source",
        None => "",
    };
    let blame = match m.blame {
        blame if blame.is_none() => String::new(),
        Blame { readers, withdrawn } => {
            let given = if withdrawn { ", given to nobody" } else { "" };
            format!(", WRONG BYTES found by {}{given}", human::count(readers.into(), "reader"))
        }
    };
    let doubts = if m.doubts > 0 { format!(", in doubt ({} reports)", m.doubts) } else { String::new() };
    format!(
        "{role}{name} {} {percent}%{rate}, {memory} of host {host}, by {}, {} of {} readers, lease {}{upstream}{doubts}{blame}",
        m.member,
        match (m.egress.as_slice(), m.transports.as_slice()) {
            ([], []) => "nothing".to_owned(),
            // A service of an earlier release does not say.
            ([], transports) => transports.join(" "),
            (by, _) => egress(by),
        },
        m.readers.len(),
        m.most_readers,
        human::ms(m.lease_left_ms as f64),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(blame: Blame, egress: Vec<Egress>) -> MemberStatus {
        let text = r#"{"member":"00000000000000ab","name":null,"role":"seed","content":0,"holds":9,"bytes_per_s":0,"upstream":null,
            "readers":[],"most_readers":4,"place":{"host":"h"},"transports":["ipc","tcp"],"lease_left_ms":1000,"doubts":0}"#;
        MemberStatus { blame, egress, ..serde_json::from_str(text).unwrap() }
    }

    #[test]
    fn wrong_bytes_and_bounds_are_said_and_what_an_earlier_service_leaves_out_is_not() {
        let early = line(&member(Blame::default(), Vec::new()), 9);
        assert!(early.contains("by ipc tcp, ") && !early.contains("WRONG"), "{early}");
        let ipc = Egress { transport: "ipc".into(), bound: Bound::Cooperative, bytes_per_s: None };
        let tcp = Egress { transport: "tcp".into(), bound: Bound::Enforced, bytes_per_s: Some(2_000_000) };
        let shown = line(&member(Blame { readers: 2, withdrawn: true }, vec![ipc, tcp]), 9);
        assert!(shown.contains("by ipc (cooperative) tcp (enforced, 2.0 MB/s), "), "{shown}");
        assert!(shown.ends_with(", WRONG BYTES found by 2 readers, given to nobody"), "{shown}");
        let once = line(&member(Blame { readers: 1, withdrawn: false }, Vec::new()), 9);
        assert!(once.ends_with("found by 1 reader"), "{once}");
    }
}
