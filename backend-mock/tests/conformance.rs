//! The conformance suite on the mock.

#[allow(unreachable_pub)]
mod fixture;

fn main() -> std::process::ExitCode {
    flashboot_conformance::main(|| fixture::MockFixture::boxed(Default::default()))
}
