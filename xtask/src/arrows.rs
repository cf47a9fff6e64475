//! Which of our crates may use which, and where `unsafe` and anyhow may be.
//!
//! Owns: the one table of arrows. Pure over a [`Graph`]; `workspace.rs` reads one from cargo. A crate that the
//! table does not know is refused, so that the table is complete; backends are known by their prefix, so that
//! a new one needs no line here.

use std::collections::BTreeSet;

/// Our crates and what they use.
#[derive(Debug, Clone, Default)]
pub(crate) struct Graph {
    pub(crate) crates: Vec<Crate>,
}

/// One crate of ours.
#[derive(Debug, Clone, Default)]
pub(crate) struct Crate {
    pub(crate) name: String,
    /// Uses of our own crates.
    pub(crate) edges: Vec<Edge>,
    /// Names of the third-party crates it uses, of any kind.
    pub(crate) third_party: BTreeSet<String>,
    /// Its `lib.rs` and `main.rs` files.
    pub(crate) roots: Vec<Root>,
}

/// A use of one of our crates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Edge {
    pub(crate) to: String,
    pub(crate) when: When,
}

/// What a dependency is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// It ships (normal and build dependencies).
    Always,
    /// It is there for the crate's own tests.
    Test,
}

/// A root file and its text.
#[derive(Debug, Clone)]
pub(crate) struct Root {
    pub(crate) file: String,
    pub(crate) text: String,
}

/// A place in the order of arrows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Core,
    /// Host memory.
    Material,
    /// The CUDA driver API, which pins host memory.
    Cuda,
    CudaSim,
    /// Control channels between hosts.
    Channel,
    Driver,
    Rendezvous,
    Loader,
    Checkpoint,
    Backend,
    Conformance,
    Sim,
    Facade,
    /// The command, which the Python package brings along.
    Command,
    Face,
    Xtask,
}

const BACKEND_PREFIX: &str = "flashboot-backend-";

fn place(name: &str) -> Option<Place> {
    Some(match name {
        "flashboot-core" => Place::Core,
        "flashboot-memory" => Place::Material,
        "flashboot-cuda" => Place::Cuda,
        "flashboot-cuda-sim" => Place::CudaSim,
        "flashboot-channel" => Place::Channel,
        "flashboot-driver" => Place::Driver,
        "flashboot-rendezvous" => Place::Rendezvous,
        "flashboot-loader" => Place::Loader,
        "flashboot-checkpoint" => Place::Checkpoint,
        "flashboot-conformance" => Place::Conformance,
        "flashboot-sim" => Place::Sim,
        "flashboot" => Place::Facade,
        "flashboot-cli" => Place::Command,
        "flashboot-python" | "flashboot-capi" => Place::Face,
        "xtask" => Place::Xtask,
        other if other.starts_with(BACKEND_PREFIX) => Place::Backend,
        _ => return None,
    })
}

/// What a crate at this place may use in what ships.
fn may_use(from: Place) -> &'static [Place] {
    use Place::*;
    match from {
        Core | Xtask => &[],
        Material | Channel | Driver => &[Core],
        Rendezvous => &[Core, Channel],
        Cuda => &[Core, Material],
        CudaSim | Checkpoint => &[Core, Material, Cuda],
        Loader => &[Core, Material, Cuda, Channel, Checkpoint],
        Backend => &[Core, Material, Cuda, Channel],
        Conformance | Sim => &[Core, Driver, Rendezvous],
        Facade => &[Core, Material, Cuda, Channel, Driver, Rendezvous, Loader, Checkpoint, Backend, Sim],
        Command => {
            &[Core, Material, Cuda, Channel, Driver, Rendezvous, Loader, Checkpoint, Backend, Sim, Facade]
        }
        Face => &[
            Core, Material, Cuda, Channel, Driver, Rendezvous, Loader, Checkpoint, Backend, Sim, Facade,
            Command,
        ],
    }
}

/// Whether a crate's tests may use another. Tests may reach sideways, but a backend's never take another
/// backend, and no test takes a face or xtask as a library.
fn tests_may_use(from: Place, to: Place) -> bool {
    match to {
        Place::Command | Place::Face | Place::Xtask => false,
        Place::Backend => from != Place::Backend,
        _ => true,
    }
}

/// Where `unsafe` may be; every other root says `forbid` (core: `deny`, for its one unsafe trait).
fn may_hold_unsafe(place: Place, name: &str) -> bool {
    matches!(place, Place::Material | Place::Cuda | Place::CudaSim | Place::Backend)
        || matches!(name, "flashboot-capi" | "flashboot-python")
}

/// Everything that is wrong with `graph`, one sentence each, in the graph's order.
pub(crate) fn check(graph: &Graph) -> Vec<String> {
    let mut wrong = Vec::new();
    for krate in &graph.crates {
        let Some(from) = place(&krate.name) else {
            wrong.push(format!(
                "{} has no place in the order of arrows: add it to xtask/src/arrows.rs",
                krate.name
            ));
            continue;
        };
        check_edges(krate, from, &mut wrong);
        check_unsafe(krate, from, &mut wrong);
        if krate.third_party.contains("anyhow") && !matches!(krate.name.as_str(), "flashboot-cli" | "xtask") {
            wrong.push(format!(
                "{} uses anyhow: only cli and xtask may; give it an error type of its own",
                krate.name
            ));
        }
    }
    wrong
}

fn check_edges(krate: &Crate, from: Place, wrong: &mut Vec<String>) {
    for edge in &krate.edges {
        // An unknown crate is reported once, where it stands.
        let Some(to) = place(&edge.to) else { continue };
        match edge.when {
            When::Always if !may_use(from).contains(&to) => {
                wrong.push(format!("{} must not depend on {}", krate.name, edge.to));
            }
            When::Test if !tests_may_use(from, to) => {
                wrong.push(format!("{}'s tests must not depend on {}", krate.name, edge.to));
            }
            _ => {}
        }
    }
}

fn check_unsafe(krate: &Crate, from: Place, wrong: &mut Vec<String>) {
    if may_hold_unsafe(from, &krate.name) {
        return;
    }
    let level = if from == Place::Core { "deny" } else { "forbid" };
    let line = format!("#![{level}(unsafe_code)]");
    for root in &krate.roots {
        if !root.text.lines().any(|l| l.trim() == line) {
            wrong.push(format!("{}'s {} does not say {line}", krate.name, root.file));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORBID: &str = "//! x\n#![forbid(unsafe_code)]\n";

    fn krate(name: &str, edges: &[(&str, When)]) -> Crate {
        let text = if name == "flashboot-core" { "#![deny(unsafe_code)]" } else { FORBID };
        Crate {
            name: name.into(),
            edges: edges.iter().map(|(to, when)| Edge { to: (*to).into(), when: *when }).collect(),
            third_party: BTreeSet::new(),
            roots: vec![Root { file: "lib.rs".into(), text: text.into() }],
        }
    }

    fn verdict(name: &str, to: &str, when: When) -> Vec<String> {
        check(&Graph { crates: vec![krate(name, &[(to, when)])] })
    }

    #[test]
    fn every_forbidden_arrow_is_refused_by_name() {
        for (from, to) in [
            ("flashboot-core", "flashboot-memory"),
            ("flashboot-core", "flashboot-driver"),
            ("flashboot-memory", "flashboot-cuda"),
            ("flashboot-memory", "flashboot-backend-ipc"),
            ("flashboot-channel", "flashboot-memory"),
            ("flashboot-channel", "flashboot-rendezvous"),
            ("flashboot-driver", "flashboot-channel"),
            ("flashboot-checkpoint", "flashboot-channel"),
            ("flashboot-driver", "flashboot-memory"),
            ("flashboot-driver", "flashboot-rendezvous"),
            ("flashboot-driver", "flashboot-backend-mock"),
            ("flashboot-rendezvous", "flashboot-driver"),
            ("flashboot-rendezvous", "flashboot-memory"),
            ("flashboot-backend-ipc", "flashboot-backend-mock"),
            ("flashboot-backend-ipc", "flashboot-driver"),
            ("flashboot-backend-ipc", "flashboot-conformance"),
            ("flashboot-conformance", "flashboot-backend-mock"),
            ("flashboot-conformance", "flashboot-memory"),
            ("flashboot-checkpoint", "flashboot-loader"),
            ("flashboot-loader", "flashboot"),
            ("flashboot-sim", "flashboot-backend-mock"),
            ("flashboot", "flashboot-conformance"),
            ("flashboot", "flashboot-cli"),
            ("flashboot-cli", "flashboot-python"),
            ("flashboot-cli", "flashboot-conformance"),
            ("flashboot-cli", "xtask"),
            ("xtask", "flashboot-core"),
        ] {
            assert_eq!(
                verdict(from, to, When::Always),
                [format!("{from} must not depend on {to}")],
                "{from} -> {to}"
            );
        }
    }

    #[test]
    fn arrows_that_point_down_pass() {
        for (from, to) in [
            ("flashboot-memory", "flashboot-core"),
            ("flashboot-backend-ipc", "flashboot-memory"),
            ("flashboot-backend-imex", "flashboot-cuda"),
            ("flashboot-channel", "flashboot-core"),
            ("flashboot-backend-tcp", "flashboot-channel"),
            ("flashboot-rendezvous", "flashboot-channel"),
            ("flashboot-loader", "flashboot-channel"),
            ("flashboot", "flashboot-channel"),
            ("flashboot-conformance", "flashboot-driver"),
            ("flashboot-conformance", "flashboot-rendezvous"),
            ("flashboot-checkpoint", "flashboot-core"),
            ("flashboot", "flashboot-backend-rdma"),
            ("flashboot-cli", "flashboot"),
            ("flashboot-capi", "flashboot"),
            ("flashboot-python", "flashboot-cli"),
        ] {
            assert_eq!(verdict(from, to, When::Always), [""; 0], "{from} -> {to}");
        }
    }

    #[test]
    fn tests_may_reach_sideways_but_not_to_another_backend_or_a_face() {
        assert_eq!(verdict("flashboot-backend-ipc", "flashboot-conformance", When::Test), [""; 0]);
        assert_eq!(verdict("flashboot-conformance", "flashboot-backend-mock", When::Test), [""; 0]);
        assert_eq!(
            verdict("flashboot-backend-ipc", "flashboot-backend-mock", When::Test),
            ["flashboot-backend-ipc's tests must not depend on flashboot-backend-mock"]
        );
        assert_eq!(
            verdict("flashboot", "flashboot-cli", When::Test),
            ["flashboot's tests must not depend on flashboot-cli"]
        );
    }

    #[test]
    fn a_crate_unknown_to_the_table_is_refused() {
        let graph = Graph { crates: vec![krate("flashboot-utils", &[])] };
        assert_eq!(
            check(&graph),
            ["flashboot-utils has no place in the order of arrows: add it to xtask/src/arrows.rs"]
        );
    }

    #[test]
    fn a_root_without_forbid_is_refused_where_unsafe_may_not_be() {
        let mut driver = krate("flashboot-driver", &[]);
        driver.roots[0].text = "//! mentions #![forbid(unsafe_code)] only\n".into();
        let mut core = krate("flashboot-core", &[]);
        core.roots[0].text = FORBID.into();
        let mut ipc = krate("flashboot-backend-ipc", &[]);
        ipc.roots[0].text.clear();
        let mut cli = krate("flashboot-cli", &[]);
        cli.roots[0].text.clear();
        let mut python = krate("flashboot-python", &[]);
        python.roots[0].text.clear();
        assert_eq!(
            check(&Graph { crates: vec![driver, core, ipc, python, cli] }),
            [
                "flashboot-driver's lib.rs does not say #![forbid(unsafe_code)]",
                "flashboot-core's lib.rs does not say #![deny(unsafe_code)]",
                "flashboot-cli's lib.rs does not say #![forbid(unsafe_code)]",
            ]
        );
    }

    #[test]
    fn anyhow_is_for_cli_and_xtask_only() {
        let with = |name| Crate { third_party: ["anyhow".to_owned()].into(), ..krate(name, &[]) };
        assert_eq!(
            check(&Graph { crates: vec![with("flashboot-cli"), with("xtask"), with("flashboot")] }),
            ["flashboot uses anyhow: only cli and xtask may; give it an error type of its own"]
        );
    }
}
