//! Parses manifests of MetalLB's kinds for BGP.

use lb_core::{
    announce::bgp::{BfdProfile, BgpAdvertisement, Community, Object, Peer},
    api,
    convert::ConvertError,
};
use serde_json::Value;

use super::{
    addresses::field_error,
    condition::{FieldError, FieldErrors},
    parse::{Resource, typed},
    schema,
};

type Read = Result<Resource, Vec<FieldError>>;

pub(super) fn advertisement(value: &Value) -> Read {
    let advertisement: api::BgpAdvertisement = typed::<schema::BgpAdvertisement, _>(value)?;
    BgpAdvertisement::new(&advertisement).map(|it| Resource::Bgp(Object::Advertisement(it))).map_err(refused)
}

pub(super) fn peer(value: &Value) -> Read {
    let peer: api::BgpPeer = typed::<schema::BgpPeer, _>(value).map_err(without_password)?;
    let peer = Peer::new(&peer).map_err(refused)?;
    if peer.password_secret.is_some() {
        let mut errors = FieldErrors::default();
        errors.forbidden(
            "spec.passwordSecret",
            "the agent reads no Secrets from manifests; give spec.password",
        );
        return Err(errors.0);
    }
    Ok(Resource::Bgp(Object::Peer(Box::new(peer))))
}

pub(super) fn communities(value: &Value) -> Read {
    let community: api::Community = typed::<schema::Community, _>(value)?;
    Community::names(&community).map(|it| Resource::Bgp(Object::Communities(it))).map_err(refused)
}

pub(super) fn profile(value: &Value, warnings: &mut Vec<FieldError>) -> Read {
    let profile: api::BfdProfile = typed::<schema::BfdProfile, _>(value)?;
    let (profile, ignored) = BfdProfile::new(&profile).map_err(refused)?;
    warnings.extend(ignored.into_iter().map(field_error));
    Ok(Resource::Bgp(Object::Profile(profile)))
}

/// Removes quoted values, which may be or contain a password, from errors about a field's type. (Errors about unknown
/// fields quote only the field's name.)
fn without_password(mut errors: Vec<FieldError>) -> Vec<FieldError> {
    let may_quote = |error: &&mut FieldError| {
        ["", "spec"].contains(&&*error.field) || error.field.starts_with("spec.password")
    };
    for error in errors.iter_mut().filter(may_quote).filter(|error| error.message != "unknown field") {
        error.message = "Invalid value: has another type than expected; quote a text of digits".to_owned();
    }
    errors
}

fn refused(error: ConvertError) -> Vec<FieldError> {
    vec![field_error(error)]
}
