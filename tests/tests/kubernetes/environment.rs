//! Tests of the environment variables of Services of an API server.

use lb_tests::agent::{binary, run};
use serde_json::json;

use crate::bed::{Bed, LIMIT};

/// The output of `lb-agent` with these arguments; `None` if the command fails, as it does until the agent runs.
fn text(bed: &Bed, arguments: &[&str]) -> Option<String> {
    let mut command = bed.netns.command(binary());
    command.args(arguments).env("LB_AGENT_BPFFS", bed.bpffs());
    Some(String::from_utf8(run(&mut command).ok()?.stdout).unwrap())
}

#[test]
fn variables_begin_with_those_of_the_api_server_in_every_namespace() {
    let mut bed = Bed::with_faults();
    bed.put("a", 1);
    let mut api_server = bed.service("kubernetes", 2);
    api_server["metadata"]["namespace"] = "default".into();
    api_server["spec"]["ports"] =
        json!([{"name": "https", "port": 443, "protocol": "TCP", "targetPort": 6443}]);
    let mut shop = bed.service("shop", 3);
    shop["metadata"]["namespace"] = "other".into();
    [&api_server, &shop].into_iter().for_each(|service| bed.cluster.apply(service));
    bed.start_agent();
    let ip = |service: &serde_json::Value| service["spec"]["clusterIP"].as_str().unwrap().to_owned();
    let first = [
        format!("export KUBERNETES_SERVICE_HOST='{}'", ip(&api_server)),
        "export KUBERNETES_SERVICE_PORT='443'".to_owned(),
        "export KUBERNETES_SERVICE_PORT_HTTPS='443'".to_owned(),
    ];
    let variables =
        |namespace: &str| text(&bed, &["service", "env", "--namespace", namespace]).unwrap_or_default();
    for (namespace, own, foreign) in [("other", "SHOP", "A"), ("default", "A", "SHOP")] {
        let has = |text: &str, service: &str| text.contains(&format!("\nexport {service}_SERVICE_HOST="));
        bed.wait_until(namespace, LIMIT, |_| has(&variables(namespace), own));
        let text = variables(namespace);
        assert!(!has(&text, foreign), "{text}");
        assert_eq!(text.lines().take(3).collect::<Vec<_>>(), first, "{text}");
    }
    let script = "echo $SHOP_SERVICE_HOST,$A_SERVICE_HOST,$KUBERNETES_SERVICE_HOST";
    let of_program = text(&bed, &["exec", "--namespace", "other", "--", "sh", "-c", script]);
    assert_eq!(of_program.unwrap(), format!("{},,{}\n", ip(&shop), ip(&api_server)));
}
