//! A client that creates and deletes objects through the API of the mock server or of a real one.

use std::{
    env, io,
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    thread,
};

use kube::{
    Api, Client, Config,
    api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use lb_tests::netns::Netns;
use serde_json::{Value, json};

use crate::api_server::ApiServer;

/// Environment variable with the path of a kubeconfig. Tests that simulate no faults use the API server that this
/// kubeconfig names.
const REAL: &str = "LB_TEST_KUBECONFIG";

/// A client of an API server, real or mock.
pub(crate) struct Cluster {
    kubeconfig: Kubeconfig,
    /// The namespace from which the server can be reached; `None` for that of the test process.
    netns: Option<Netns>,
}

/// Connects a namespace with an API server: with `real`, or else with a mock in the namespace. Returns the mock, a
/// client of the server in use, and a kubeconfig for programs in the namespace.
pub(crate) fn connect(real: Option<Cluster>, netns: &Netns) -> (Option<ApiServer>, Cluster, String) {
    if let Some(real) = real {
        let kubeconfig = real.kubeconfig_inside(netns);
        return (None, real, kubeconfig);
    }
    let server = ApiServer::start(Some(netns));
    let kubeconfig = server.kubeconfig();
    let cluster = Cluster::inside(&kubeconfig, netns);
    (Some(server), cluster, kubeconfig)
}

impl Cluster {
    /// A client of a mock server that listens in the namespace.
    pub(crate) fn inside(kubeconfig: &str, netns: &Netns) -> Self {
        Self { kubeconfig: serde_json::from_str(kubeconfig).unwrap(), netns: Some(netns.clone()) }
    }

    /// A client of the real server that the environment names; `None` if it names none.
    pub(crate) fn real() -> Option<Self> {
        let path = PathBuf::from(env::var_os(REAL)?);
        let kubeconfig = Kubeconfig::read_from(&path).unwrap_or_else(|error| panic!("{REAL}: {error}"));
        Some(Self { kubeconfig, netns: None })
    }

    /// A client of a server that can be reached from the namespace of the test process.
    pub(crate) fn outside(kubeconfig: &str) -> Self {
        Self { kubeconfig: serde_json::from_str(kubeconfig).unwrap(), netns: None }
    }

    /// A kubeconfig for programs in the namespace, which reach a real server only through a forwarder.
    pub(crate) fn kubeconfig_inside(&self, netns: &Netns) -> String {
        let mut kubeconfig = self.kubeconfig.clone();
        let current = kubeconfig.current_context.clone();
        let context = kubeconfig.contexts.iter().find(|context| Some(&context.name) == current.as_ref());
        let name = context.unwrap().context.as_ref().unwrap().cluster.clone();
        let cluster = kubeconfig.clusters.iter_mut().find(|cluster| cluster.name == name).unwrap();
        let cluster = cluster.cluster.as_mut().unwrap();
        let server = cluster.server.clone().unwrap();
        let (scheme, rest) = server.split_once("://").unwrap();
        let authority = rest.trim_end_matches('/').to_owned();
        let host = authority.rsplit_once(':').map_or(authority.as_str(), |(host, _)| host);
        cluster.tls_server_name.get_or_insert_with(|| host.trim_matches(['[', ']']).to_owned());
        let default_port = if scheme == "https" { 443 } else { 80 };
        let target =
            if host == authority { format!("{authority}:{default_port}") } else { authority.clone() };
        cluster.server = Some(format!("{scheme}://{}", forward(netns, target)));
        serde_json::to_string(&kubeconfig).unwrap()
    }

    /// Applies an object, then its status, which an API server accepts only in a separate request.
    pub(crate) fn apply(&self, object: &Value) {
        let (name, api_of) = handle(object);
        let mut object = object.clone();
        let status = object.as_object_mut().unwrap().remove("status");
        self.block_on(async move |client| {
            let api: Api<DynamicObject> = api_of(client);
            let parameters = PatchParams::apply("lb-tests").force();
            api.patch(&name, &parameters, &Patch::Apply(&object)).await?;
            if let Some(status) = status {
                let status =
                    json!({"apiVersion": object["apiVersion"], "kind": object["kind"], "status": status});
                api.patch_status(&name, &PatchParams::default(), &Patch::Merge(&status)).await?;
            }
            Ok(())
        });
    }

    pub(crate) fn delete(&self, object: &Value) {
        let (name, api_of) = handle(object);
        self.block_on(async move |client| {
            api_of(client).delete(&name, &DeleteParams::default()).await.map(drop)
        });
    }

    /// Changes an object by a strategic merge patch, as `kubectl patch` and `kubectl label` do.
    pub(crate) fn patch(&self, object: &Value, patch: Value) {
        let (name, api_of) = handle(object);
        self.block_on(async move |client| {
            let api: Api<DynamicObject> = api_of(client);
            api.patch(&name, &PatchParams::default(), &Patch::Strategic(patch)).await.map(drop)
        });
    }

    /// Runs `work` with a client of the server, in the namespace from which the server can be reached.
    #[track_caller]
    fn block_on(&self, work: impl AsyncFnOnce(Client) -> kube::Result<()> + Send) {
        let run = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let options = KubeConfigOptions::default();
                let config = Config::from_custom_kubeconfig(self.kubeconfig.clone(), &options).await;
                let client = Client::try_from(config.map_err(io::Error::other)?).map_err(io::Error::other)?;
                work(client).await.map_err(io::Error::other)
            })
        };
        match &self.netns {
            Some(netns) => netns.run(run),
            None => run(),
        }
        .unwrap();
    }
}

/// The name of an object, and a function that creates the [`Api`] to access it.
fn handle(object: &Value) -> (String, impl FnOnce(Client) -> Api<DynamicObject> + Send + use<>) {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let (version, kind) = (text(&object["apiVersion"]), text(&object["kind"]));
    let (group, version) = version.rsplit_once('/').unwrap_or(("", &version));
    let plural = format!("{}s", kind.to_lowercase());
    let resource = ApiResource {
        group: group.to_owned(),
        version: version.to_owned(),
        api_version: text(&object["apiVersion"]),
        kind,
        plural,
    };
    let namespace = object["metadata"]["namespace"].as_str().map(ToOwned::to_owned);
    let api = move |client| match namespace {
        Some(namespace) => Api::namespaced_with(client, &namespace, &resource),
        None => Api::all_with(client, &resource),
    };
    (text(&object["metadata"]["name"]), api)
}

/// Forwards connections from a port in the namespace to `target` outside of it, until the process ends.
fn forward(netns: &Netns, target: String) -> SocketAddr {
    let listener = netns.run(|| TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for inside in listener.incoming().map_while(Result::ok) {
            if let Ok(outside) = TcpStream::connect(&target) {
                let copies = (inside.try_clone().unwrap(), outside.try_clone().unwrap());
                thread::spawn(move || copy(inside, outside));
                thread::spawn(move || copy(copies.1, copies.0));
            }
        }
    });
    address
}

fn copy(mut from: TcpStream, mut to: TcpStream) {
    _ = io::copy(&mut from, &mut to);
    _ = to.shutdown(Shutdown::Both);
}
