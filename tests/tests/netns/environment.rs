//! Tests of the environment variables of Services: `service env` and `exec`.

use std::process::{Command, Output};

use lb_tests::{agent, wait_for};

use crate::bed::{Bed, vips};

/// A command that runs `lb-agent` on node 1 with these arguments.
fn command(bed: &Bed, arguments: &[&str]) -> Command {
    let mut command = bed.cluster.node1.command(agent::binary());
    command.args(arguments).env("LB_AGENT_BPFFS", bed.cluster.bpffs(1));
    command
}

fn output(bed: &Bed, arguments: &[&str]) -> Output {
    command(bed, arguments).output().unwrap()
}

fn text(bed: &Bed, arguments: &[&str]) -> String {
    String::from_utf8(agent::run(&mut command(bed, arguments)).unwrap().stdout).unwrap()
}

#[test]
fn processes_get_the_variables_of_services_in_their_namespace() {
    let bed = Bed::with_web(&["pod2"]);
    let shell = text(&bed, &["service", "env"]);
    let first: Vec<&str> = shell.lines().take(5).collect();
    let expected = [
        "export WEB_SERVICE_HOST='10.96.0.10'",
        "export WEB_SERVICE_PORT='80'",
        "export WEB_SERVICE_PORT_HTTP='80'",
        "export WEB_SERVICE_PORT_ECHO='53'",
        "export WEB_PORT='tcp://10.96.0.10:80'",
    ];
    assert_eq!(first, expected, "{shell}");
    let script = r#"eval "$("$0" service env)"; echo "$WEB_PORT_80_TCP_ADDR""#;
    let mut through_shell = bed.cluster.node1.command("sh");
    through_shell.args(["-c", script]).arg(agent::binary()).env("LB_AGENT_BPFFS", bed.cluster.bpffs(1));
    assert_eq!(agent::run(&mut through_shell).unwrap().stdout, b"10.96.0.10\n");

    assert_eq!(text(&bed, &["service", "env", "--namespace", "elsewhere"]), "");
    let of_program = text(&bed, &["exec", "--", "sh", "-c", "echo $WEB_SERVICE_HOST $0", "--version"]);
    assert_eq!(of_program, "10.96.0.10 --version\n");
    let mut set = command(&bed, &["exec", "sh", "-c", "echo $WEB_SERVICE_HOST $WEB_SERVICE_PORT"]);
    let set = agent::run(set.env("WEB_SERVICE_HOST", "mine")).unwrap();
    assert_eq!(set.stdout, b"mine 80\n", "a variable that is set already stays");
    assert_eq!(output(&bed, &["exec", "sh", "-c", "exit 7"]).status.code(), Some(7));
    assert_eq!(output(&bed, &["exec", "/no/such/program"]).status.code(), Some(127));
    assert_eq!(output(&bed, &["exec", "/"]).status.code(), Some(126));
}

#[test]
fn variables_follow_services_and_need_an_agent() {
    let mut bed = Bed::with_web(&["pod2"]);
    bed.put("second-one", vips(20), &[]);
    let host = || text(&bed, &["exec", "sh", "-c", "echo $SECOND_ONE_SERVICE_HOST"]);
    wait_for(lb_tests::client::PATIENCE, || (host() == "10.96.0.20\n").then_some(())).unwrap();
    bed.agent.take().unwrap().terminate().unwrap();
    for arguments in [&["service", "env"][..], &["exec", "true"]] {
        let output = output(&bed, arguments);
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(1), &b""[..]));
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains("no agent of") && error.contains("start it"), "{error}");
    }
}
